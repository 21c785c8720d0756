"""What a proposer needs from core, declared as values: core acts on these and never asks who it is."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Set
from typing import Any, Literal

import attrs

#: Parts of the target that a proposer may borrow (``Needs.modules``).
EMBED = "embed"
LM_HEAD = "lm_head"
EXTRA_LAYERS = "extra_layers"
MODULES = frozenset({EMBED, LM_HEAD, EXTRA_LAYERS})


class Shape(enum.Enum):
    """How the drafts of one row hang together."""

    CHAIN = "chain"
    TREE = "tree"


class Probs(enum.Enum):
    """What a proposer tells of its own distribution."""

    NONE = "none"  #: every draft is a point mass
    FULL = "full"  #: a probability for each token of the target's vocabulary


class Tokens(enum.IntEnum):
    """Which committed tokens a proposer reads; a larger value includes the smaller ones."""

    NONE = 0
    NEW = 1  #: those fed in this step
    HISTORY = 2  #: the whole sequence of each row


class Place(enum.Enum):
    """Where a proposer works."""

    HOST = "host"  #: numpy in and out; costs one synchronisation a step
    DEVICE = "device"  #: torch tensors, never a synchronisation


class Ranks(enum.Enum):
    """Which tensor-parallel ranks run the proposer."""

    LEADER = "leader"  #: rank 0, and core broadcasts the drafts
    ALL = "all"


class Memory(enum.Enum):
    """How long a proposer remembers text."""

    REQUEST = "request"  #: until the request ends
    NAMESPACE = "namespace"  #: across the requests of one namespace


def _of(kind: Any, least: int | None = None) -> Any:
    """Validator: the value is a ``kind``, and ``least`` at least."""

    def check(owner: Any, field: Any, value: Any) -> None:
        if not isinstance(value, kind) or value is True or (least is not None and value < least):
            bound = "" if least is None else f" of at least {least}"
            owned, wanted = f"{type(owner).__name__}.{field.name}", getattr(kind, "__name__", kind)
            raise ValueError(f"{owned} must be of type {wanted}{bound}, got {value!r}")

    return check


def _each(kind: type) -> Any:
    def check(owner: Any, field: Any, values: Any) -> None:
        if not isinstance(values, Iterable) or any(not isinstance(value, kind) for value in values):
            raise ValueError(
                f"{type(owner).__name__}.{field.name} must be a tuple of {kind.__name__}, got {values!r}"
            )

    return check


@attrs.frozen
class Tap:
    """A point of the target whose hidden states are read.

    ``boundary`` is ``0..L``, the residual stream that enters block ``boundary`` (``L`` = the stream
    before the final norm of a target of ``L`` blocks), or ``"final"``, after the final norm.
    """

    boundary: int | Literal["final"]


FINAL = Tap("final")


@attrs.frozen(kw_only=True)
class KVSpec:
    """Draft layers for core's pager; they live on the target's own block table.

    The entry of token ``j`` is stored in the slot of ``j``. Layers fed with taps have no entry 0:
    they say ``first=1`` and core masks it. ``slots`` are scratch positions beyond ``Needs.depth``
    that a tree occupies while it is expanded.
    """

    layers: int = attrs.field(validator=_of(int, 1))
    heads: int = attrs.field(validator=_of(int, 1))
    k_dim: int = attrs.field(validator=_of(int, 1))
    v_dim: int = attrs.field(validator=_of(int, 1))
    dtype: str | None = attrs.field(default=None, validator=_of(str | None))  #: None: the target's
    first: int = attrs.field(default=0, validator=_of(int, 0))
    slots: int = attrs.field(default=0, validator=_of(int, 0))


@attrs.frozen(kw_only=True)
class Needs:
    """Everything core must provide for a proposer, and the bounds of what it returns."""

    width: int = attrs.field(validator=_of(int))  #: most draft tokens (tree nodes) a row a step
    depth: int = attrs.field(validator=_of(int))  #: most levels; a chain has ``depth == width``
    shape: Shape = attrs.field(default=Shape.CHAIN, validator=_of(Shape))
    probs: Probs = attrs.field(default=Probs.NONE, validator=_of(Probs))
    tokens: Tokens = attrs.field(default=Tokens.NEW, validator=_of(Tokens))
    place: Place = attrs.field(default=Place.HOST, validator=_of(Place))
    taps: tuple[Tap, ...] = attrs.field(default=(), validator=_each(Tap))
    modules: frozenset[str] = attrs.field(default=frozenset(), validator=_of(Set))
    kv: tuple[KVSpec, ...] = attrs.field(default=(), validator=_each(KVSpec))
    graphs: bool = False  #: ``propose`` is static in shape and never synchronises
    scratch_bytes: int = 0  #: at the largest batch; reserved before the KV cache is sized
    ranks: Ranks = attrs.field(default=Ranks.LEADER, validator=_of(Ranks))
    memory: Memory = attrs.field(default=Memory.REQUEST, validator=_of(Memory))
    scores: bool = False  #: it fills ``Drafts.score``
    #: It can draft behind drafts of another: it reads them in the view, and keeps none (``StepView.drafted``)
    continues: bool = False
    children: tuple[Needs, ...] = ()  #: set by :meth:`union`

    def __attrs_post_init__(self) -> None:
        if self.width < 1 or not 1 <= self.depth <= self.width:
            raise ValueError(f"Needs wants 1 <= depth <= width, got depth={self.depth}, width={self.width}")
        if self.shape is Shape.CHAIN and self.depth != self.width and not self.children:
            raise ValueError(f"a chain has depth == width, got depth={self.depth}, width={self.width}")
        if unknown := self.modules - MODULES:
            raise ValueError(f"Needs.modules knows {sorted(MODULES)}, got {sorted(map(str, unknown))}")

    @property
    def reserve(self) -> int:
        """Scratch slots a row needs while drafting, beyond the slot of its last token."""
        if not self.kv:
            return 0
        return self.depth + max(spec.slots for spec in self.kv)

    @classmethod
    def union(cls, *children: Needs, width: int | None = None, depth: int | None = None) -> Needs:
        """What a proposer made of ``children`` needs.

        ``width`` and ``depth`` default to the largest of the children; a combiner that chains its
        children passes the sums. It works on the host if any child does, and gives probabilities
        only if all children do.
        """
        if not children:
            raise ValueError("Needs.union wants at least one child")
        return cls(
            width=max(c.width for c in children) if width is None else width,
            depth=max(c.depth for c in children) if depth is None else depth,
            shape=Shape.TREE if any(c.shape is Shape.TREE for c in children) else Shape.CHAIN,
            probs=Probs.FULL if all(c.probs is Probs.FULL for c in children) else Probs.NONE,
            tokens=max(c.tokens for c in children),
            place=Place.HOST if any(c.place is Place.HOST for c in children) else Place.DEVICE,
            taps=tuple(dict.fromkeys(tap for c in children for tap in c.taps)),
            modules=frozenset().union(*(c.modules for c in children)),
            kv=tuple(spec for c in children for spec in c.kv),
            graphs=all(c.graphs for c in children),
            scratch_bytes=sum(c.scratch_bytes for c in children),
            ranks=Ranks.ALL if any(c.ranks is Ranks.ALL for c in children) else Ranks.LEADER,
            memory=Memory.NAMESPACE
            if any(c.memory is Memory.NAMESPACE for c in children)
            else Memory.REQUEST,
            scores=all(c.scores for c in children),
            continues=all(c.continues for c in children),
            children=children,
        )
