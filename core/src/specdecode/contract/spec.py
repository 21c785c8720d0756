"""How a method introduces itself: names, configuration, needs, and how to build it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from .needs import Needs, Probs

if TYPE_CHECKING:
    from .proposer import Proposer

#: Number of this contract. Core accepts specs of ``API`` and ``API - 1``.
API = 1


@attrs.frozen
class TensorInfo:
    """Header of one stored tensor."""

    shape: tuple[int, ...]
    dtype: str


@attrs.frozen(kw_only=True)
class CheckpointInfo:
    """A checkpoint as its headers describe it; no weight has been read."""

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    #: there is a config and no weights, and random ones are wanted (``load_format="dummy"``): ``tensors`` is
    #: empty, and whoever supports it goes by the config
    dummy: bool = False


class TargetTokenizer(Protocol):
    """The tokenizer that requests of the target are cut by; nothing is read before it is asked."""

    def load(self) -> Any:
        """A fast tokenizer of transformers, which is imported then; a new one each time, the caller's own.

        Raises:
            ConfigError: there is none, or it cannot be read.
        """

    def entries(self) -> TokenizerEntries | None:
        """What its files say, without torch or transformers; None: they do not say it."""


@attrs.frozen
class TokenizerEntries:
    """What a tokenizer's files say."""

    tokens: Mapping[int, str] = attrs.field(repr=False)  #: id -> token
    special: frozenset[int]  #: ids of control tokens


@attrs.frozen(kw_only=True)
class TargetInfo:
    """What is known of the target before its weights are loaded."""

    path: str
    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    dtype: str  #: for example "float32"
    device: str  #: for example "cpu"
    tensor_parallel_size: int = 1
    extra_layers: int = 0  #: multi-token-prediction layers that its config announces
    value_dim: int | None = None  #: of a value head, if it is not ``head_dim``
    native: bool = True  #: run by core's own decoder, else by the code of transformers
    config: Mapping[str, Any] = attrs.field(factory=dict, repr=False)
    tokenizer: TargetTokenizer | None = attrs.field(default=None, repr=False)  #: None: of recorded ids alone
    #: there is no model: recorded texts are replayed, and but for ``vocab_size`` (at least what occurs) and
    #: ``tokenizer`` nothing is known of what wrote them
    recorded: bool = False


@attrs.frozen
class Match:
    """Answer of :attr:`ProposerSpec.recognize`: this checkpoint is mine, for this reason."""

    reason: str


class PlanContext(Protocol):
    """What ``ProposerSpec.needs`` is given beside the method's config."""

    target: TargetInfo
    draft: CheckpointInfo | None  #: set if the config names a ``model``
    probs: Probs  #: FULL if the rule of verification weighs them; a method that has them declares it then

    @property
    def target_checkpoint(self) -> CheckpointInfo:
        """The target's own headers, read when asked for; ConfigError if it has no files of weights."""

    @property
    def methods(self) -> Sequence[ProposerSpec]:
        """The installed methods that could be used, by name."""

    def needs_of(self, method: str | None, mapping: Mapping[str, Any], field: str = "") -> Needs:
        """The needs of another installed method: for proposers made of proposers.

        Args:
            method: None: the one that recognises the checkpoint that ``mapping`` names.
            field: what messages call ``mapping`` behind the parent's own path.
        """


class BuildContext(PlanContext, Protocol):
    """What ``ProposerSpec.build`` is given beside the method's config."""

    needs: Needs
    max_num_seqs: int
    strict: bool  #: what a child raises is to be raised, not lived with

    def build(self, method: str | None, mapping: Mapping[str, Any], field: str = "") -> Proposer:
        """Build a child, in the order of ``Needs.children``; arguments as of ``needs_of``."""


def never(checkpoint: CheckpointInfo) -> Match | None:
    """Recognise no checkpoint."""
    return None


@attrs.frozen(kw_only=True)
class ProposerSpec:
    """A draft method, as its plugin yields it; creating one imports nothing heavy.

    ``config`` is an attrs class that owns the method's keys of ``speculative_config`` (build it from
    the mixins of :mod:`specdecode.contract.config`). ``needs`` is pure and torch-free and raises
    :class:`Unsupported` with a reason. ``build`` is where heavy modules are imported.
    ``imports`` are third-party modules that ``build`` will need: probed, never imported.
    """

    name: str
    summary: str
    api: int
    config: type
    needs: Callable[[Any, PlanContext], Needs]
    build: Callable[[Any, BuildContext], Proposer]
    imports: tuple[str, ...] = ()
    recognize: Callable[[CheckpointInfo], Match | None] = never
