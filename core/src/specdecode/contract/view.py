"""What a proposer is shown: only what its Needs declared, so that declarations stay true."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import attrs

from .drafts import Drafts
from .errors import Undeclared
from .needs import Needs, Place, Probs, Tap, Tokens


@attrs.frozen(kw_only=True)
class RequestInfo:
    """A request as it is admitted: given to ``on_add``."""

    id: str  #: never re-used while the engine lives
    namespace: str  #: what is remembered across requests may be shown to this namespace only
    token_ids: Sequence[int]  #: all committed ids: the prompt, and on resumption the output so far
    prompt_len: int
    params: Any  #: the request's SamplingParams
    resumed: bool  #: True after a preemption: the same request, admitted again


@attrs.frozen(kw_only=True)
class Commit:
    """One row of an ``on_commit``: what the last verification made definite."""

    id: str
    token_ids: Sequence[int]  #: committed in this step, cut at a stop; empty while a prompt is computed
    accepted: int  #: how many drafts the target accepted (before the stop cut)
    prefill: bool  #: the step computed part of the prompt


class StepSource(Protocol):
    """Core's side of a :class:`StepView`: answers by name, in the form the place asks for."""

    @property
    def width(self) -> int: ...
    def rows(self, name: str, place: Place) -> Any: ...
    def own_len(self, kv: range, place: Place) -> Any: ...
    def taps(self, taps: tuple[Tap, ...]) -> tuple[Any, ...]: ...
    def ctx(self, kv: int, rows: Any, slots: Any, base: Any, extra: Any) -> Any: ...
    def sample(self, logits: Any, rows: Any, positions: Any, k: int, vocabulary: Any) -> tuple[Any, Any]: ...
    def probs(self, logits: Any, rows: Any, positions: Any, ids: Any, vocabulary: Any) -> Any: ...
    def drafts(self, needs: Needs) -> Drafts: ...
    def limit(self, name: str, value: Any, bound: int, place: Place) -> Any: ...
    def behind(self, name: str, drafts: Sequence[Drafts], place: Place) -> Any: ...


class _Shown:
    """An attribute of the view: read from core if the Needs declare it.

    ``of_requests``: it is the host's alone, so that a graph has no place for it.
    """

    def __init__(
        self, remedy: str = "", declared: Callable[[Needs], object] = bool, *, of_requests: bool = False
    ) -> None:
        self._remedy, self._declared, self._of_requests = remedy, declared, of_requests

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, view: StepView, owner: type | None = None) -> Any:
        if self._remedy and not self._declared(view._needs):
            raise Undeclared(f"StepView.{self._name} was not declared: add {self._remedy} to Needs")
        if self._of_requests and view._needs.graphs:
            raise Undeclared(
                f"StepView.{self._name} is not there with graphs=True: a graph is replayed for whichever "
                "requests fill its rows; go by what is on the device, or leave graphs out of Needs"
            )
        return view._read(self._name)


#: What is shown otherwise to a proposer that goes on from another's drafts.
_MOVED = frozenset({"committed_len", "history", "last_token", "room"})


def _fed(needs: Needs) -> bool:
    return needs.tokens >= Tokens.NEW or bool(needs.taps) or bool(needs.kv)


class StepView:
    """One step as a proposer may see it; reading what ``Needs`` did not declare raises ``Undeclared``.

    ``B`` rows; ``F`` tokens are fed. Arrays are numpy for ``Place.HOST`` and torch tensors on the
    target's device for ``Place.DEVICE``, int64 unless said otherwise; taps are always torch.

    For ``DEVICE`` a step may be a *static* one: every row is fed the same number of tokens, the last one
    again where there are no more. With ``graphs=True`` it may be captured and replayed, and what is shown of
    requests alone (``request_ids``, ``params``, ``allowed``) is never there. The rules are in
    ``docs/contract.md``.
    """

    __slots__ = ("_behind", "_kv", "_limits", "_needs", "_source")

    # per row, [B]
    request_ids = _Shown(of_requests=True)
    params = _Shown(of_requests=True)  #: SamplingParams
    committed_len = _Shown()  #: counts the last token, whose KV is not yet computed
    budget = _Shown()  #: most drafts; 0: feed, do not draft
    room = _Shown()  #: most levels, by max_tokens and the context
    #: [B, vocab] bool: what grammars let come next; None if no row has one
    allowed = _Shown(of_requests=True)
    last_token = _Shown("tokens=NEW", lambda needs: needs.tokens >= Tokens.NEW)
    #: all committed ids: for ``HOST`` a sequence of ints for each row, for ``DEVICE`` one tensor
    #: ``[B, L]`` int32, of which a row's first ``committed_len`` are its ids and the rest means nothing
    history = _Shown("tokens=HISTORY", lambda needs: needs.tokens >= Tokens.HISTORY)
    own_len = _Shown("kv", lambda needs: needs.kv)  #: draft entries 0..own_len-1 are true
    # per fed token, [F]
    ids = _Shown("tokens=NEW or kv", lambda needs: needs.tokens >= Tokens.NEW or needs.kv)
    positions = _Shown("tokens=NEW, taps or kv", _fed)
    rows = _Shown("tokens=NEW, taps or kv", _fed)  #: ascending
    last = _Shown("tokens=NEW, taps or kv", _fed)  #: [B], the index into F of each row's last fed token
    #: a tuple in the order of Needs.taps, each [F, hidden]: the target's hidden at position - 1. They may lie
    #: side by side, as columns of one tensor
    taps = _Shown("taps", lambda needs: needs.taps)

    def __init__(
        self,
        needs: Needs,
        source: StepSource,
        *,
        kv: range | None = None,
        limits: Mapping[str, Any] | None = None,
        behind: Sequence[Drafts] = (),
    ) -> None:
        self._behind = tuple(behind)
        self._needs = needs
        self._source = source
        self._kv = range(len(needs.kv)) if kv is None else kv
        self._limits = dict(limits or {})

    @property
    def width(self) -> int:
        """Most drafts that any row may give in this step, 0 to ``Needs.width``; no value of the device.

        Whoever drafts level by level need not go further, and at 0 only feeds. In a captured step it is the
        same at each replay.
        """
        return min(int(self._limits.get("width", self._source.width)), self._needs.width)

    @property
    def drafted(self) -> Any:
        """``[B]``: how many of each row's last tokens are drafts of another proposer; None: no row has any.

        They stand in ``history``, ``committed_len`` and ``last_token`` as if they were committed, and what is
        fed is without them. Nothing may be learnt from them.
        """
        return self._source.behind("drafted", self._behind, self._needs.place) if self._behind else None

    def ctx(self, rows: Any, slots: Any, base: Any, extra: Any = None, *, kv: int = 0) -> Any:
        """Attention metadata for a forward of draft layers.

        Token ``t`` belongs to row ``rows[t]`` (ascending), writes its entry to logical slot
        ``slots[t]`` and sees the slots ``first..base[t]-1`` and those of ``extra[t]``.
        The slot of a committed token is its position; the first scratch slot is
        ``committed_len``. Writes below what the row owns alone are suppressed.

        Args:
            rows, slots, base: ``[T]`` int64.
            extra: ``[T, E]`` int64, -1 where unused, or None: scratch slots of a node's ancestors
                and of itself.
            kv: which entry of ``Needs.kv`` the layers belong to.
        """
        if not self._needs.kv:
            raise Undeclared("StepView.ctx was not declared: add kv to Needs")
        return self._source.ctx(self._kv[kv], rows, slots, base, extra)

    def sample(
        self, logits: Any, rows: Any, positions: Any, k: int = 1, *, vocabulary: Any = None
    ) -> tuple[Any, Any]:
        """The ``k`` tokens the target is likeliest to draw if ``logits`` were its own.

        Under the row's transforms and the target's noise for the token at ``positions[t]``: the
        first is what the target itself would draw (Gumbel coupling: Daliri, Musco and Suresh,
        arXiv 2408.07978). Greedy rows have no noise. Under a rule that weighs probabilities the noise
        is the drafter's own, and the ids are ``k`` draws without replacement, in order.

        Args:
            logits: ``[T, Vd]`` float.
            rows, positions: ``[T]`` int64; a position is the index of the token drawn.
            k: how many, at most ``Vd``.
            vocabulary: ``[Vd]`` int64, the target's id of each column, of a method that drafts from some of
                its tokens; no two alike. None: column ``j`` is token ``j``. Tokens without a column are not
                drafted, as if their logits were -inf.

        Returns:
            ids ``[T, k]`` int64, and scores ``[T, k]`` float32, log-probability plus noise.
        """
        return self._source.sample(logits, rows, positions, k, vocabulary)

    def probs(self, logits: Any, rows: Any, positions: Any, ids: Any, *, vocabulary: Any = None) -> Any:
        """The laws that :meth:`sample` drew ``ids`` from, to be written into ``Drafts.probs``.

        Args:
            logits, rows, positions, vocabulary: as given to :meth:`sample`.
            ids: ``[T, k]`` int64, what it gave.

        Returns:
            ``[T, k, vocab]`` float32: each id's law, given that those before it were drawn.
        """
        if self._needs.probs is not Probs.FULL:
            raise Undeclared("StepView.probs was not declared: add probs=FULL to Needs")
        return self._source.probs(logits, rows, positions, ids, vocabulary)

    def for_child(
        self, index: int, budget: Any = None, *, after: Drafts | None = None
    ) -> tuple[StepView, Drafts]:
        """The view of child ``index`` of ``Needs.children``, and drafts of its own to fill.

        Args:
            budget: ``[B]`` int64, most drafts the child may give; never more than its width. An integer is
                for all rows, and at 0 the child is fed and knows that nothing is asked of it (``width``).
            after: chains that the child is to go on from, each row's ``lens`` within its budget and room. The
                child's nodes hang on the last of them (parent -1). Only for a child that ``continues``.
        """
        if not self._needs.children:
            raise Undeclared("StepView.for_child: Needs has no children; declare them with Needs.union")
        child = self._needs.children[index]
        if after is not None and not child.continues:
            raise Undeclared(f"StepView.for_child: child {index} does not declare continues=True")
        start = self._kv.start + sum(len(c.kv) for c in self._needs.children[:index])
        limits = dict(self._limits)
        if isinstance(budget, int):
            limits["width"] = min(self.width, budget)
            limits["budget"] = self._source.limit("budget", self.budget, budget, self._needs.place)
        elif budget is not None:
            limits["budget"] = budget
            if self._needs.place is Place.HOST:  # where reading it waits for nobody
                limits["width"] = min(self.width, max(map(int, budget), default=0))
        view = StepView(
            child,
            self._source,
            kv=range(start, start + len(child.kv)),
            limits=limits,
            behind=self._behind if after is None else (*self._behind, after),
        )
        return view, self._source.drafts(child)

    def _read(self, name: str) -> Any:
        needs, source = self._needs, self._source
        if name == "taps":
            return source.taps(needs.taps)
        if name == "own_len":
            return source.own_len(self._kv, needs.place)
        value = self._limits.get(name)
        if value is None and self._behind and name in _MOVED:
            value = source.behind(name, self._behind, needs.place)
        elif value is None:
            value = source.rows(name, needs.place)
        bound = {"budget": needs.width, "room": needs.depth}.get(name)
        return value if bound is None else source.limit(name, value, bound, needs.place)
