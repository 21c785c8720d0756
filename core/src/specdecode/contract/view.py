"""What a proposer is shown: only what its Needs declared, so that declarations stay true."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs

from .drafts import Drafts
from .errors import Undeclared
from .needs import Needs, Place, Tap, Tokens


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

    def rows(self, name: str, place: Place) -> Any: ...
    def own_len(self, kv: range, place: Place) -> Any: ...
    def taps(self, taps: tuple[Tap, ...]) -> tuple[Any, ...]: ...
    def ctx(self, kv: int, rows: Any, slots: Any, base: Any, extra: Any) -> Any: ...
    def sample(self, logits: Any, rows: Any, positions: Any, k: int) -> tuple[Any, Any]: ...
    def drafts(self, needs: Needs) -> Drafts: ...
    def limit(self, name: str, value: Any, bound: int, place: Place) -> Any: ...


class StepView:
    """One step as a proposer may see it; reading what ``Needs`` did not declare raises ``Undeclared``.

    ``B`` rows; ``F`` tokens are fed. Arrays are numpy for ``Place.HOST`` and torch tensors on the
    target's device for ``Place.DEVICE``, int64 unless said otherwise; ``taps`` are always torch.

    Per row: ``request_ids``, ``committed_len`` (counts ``last_token``, whose KV is not yet
    computed), ``last_token``, ``budget`` (most drafts; 0: feed, do not draft), ``room`` (most
    levels, by max_tokens and the context), ``own_len`` (draft entries 0..own_len-1 are true),
    ``params`` (SamplingParams), ``allowed`` (grammar mask or None), ``history`` (all committed ids).
    Per fed token: ``ids``, ``positions``, ``rows`` (ascending), ``taps[i]`` ``[F, hidden]`` (the
    target's hidden at position - 1, in the order of ``Needs.taps``); ``last`` ``[B]`` is the index
    into ``F`` of each row's last fed token.
    """

    __slots__ = ("_kv", "_limits", "_needs", "_source")

    def __init__(
        self,
        needs: Needs,
        source: StepSource,
        *,
        kv: range | None = None,
        limits: Mapping[str, Any] | None = None,
    ) -> None:
        self._needs = needs
        self._source = source
        self._kv = range(len(needs.kv)) if kv is None else kv
        self._limits = dict(limits or {})

    # -- rows -----------------------------------------------------------------------------------
    @property
    def request_ids(self) -> Sequence[str]:
        ids: Sequence[str] = self._rows("request_ids")
        return ids

    @property
    def params(self) -> Sequence[Any]:
        params: Sequence[Any] = self._rows("params")
        return params

    @property
    def committed_len(self) -> Any:
        return self._rows("committed_len")

    @property
    def budget(self) -> Any:
        return self._limited("budget", self._needs.width)

    @property
    def room(self) -> Any:
        return self._limited("room", self._needs.depth)

    @property
    def allowed(self) -> Any:
        return self._rows("allowed")

    @property
    def last_token(self) -> Any:
        self._declared("last_token", self._needs.tokens >= Tokens.NEW, "tokens=NEW")
        return self._rows("last_token")

    @property
    def history(self) -> Sequence[Sequence[int]]:
        self._declared("history", self._needs.tokens >= Tokens.HISTORY, "tokens=HISTORY")
        history: Sequence[Sequence[int]] = self._rows("history")
        return history

    @property
    def own_len(self) -> Any:
        self._declared("own_len", bool(self._needs.kv), "kv")
        return self._source.own_len(self._kv, self._needs.place)

    # -- fed tokens -----------------------------------------------------------------------------
    @property
    def ids(self) -> Any:
        self._declared("ids", self._needs.tokens >= Tokens.NEW or bool(self._needs.kv), "tokens=NEW or kv")
        return self._rows("ids")

    @property
    def positions(self) -> Any:
        return self._fed("positions")

    @property
    def rows(self) -> Any:
        return self._fed("rows")

    @property
    def last(self) -> Any:
        return self._fed("last")

    @property
    def taps(self) -> tuple[Any, ...]:
        self._declared("taps", bool(self._needs.taps), "taps")
        return self._source.taps(self._needs.taps)

    # -- services -------------------------------------------------------------------------------
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
        self._declared("ctx", bool(self._needs.kv), "kv")
        return self._source.ctx(self._kv[kv], rows, slots, base, extra)

    def sample(self, logits: Any, rows: Any, positions: Any, k: int = 1) -> tuple[Any, Any]:
        """The ``k`` tokens the target is likeliest to draw if ``logits`` were its own.

        Under the row's transforms and the target's noise for the token at ``positions[t]``: the
        first is what the target itself would draw (Gumbel coupling: Daliri, Musco and Suresh,
        arXiv 2408.07978). Greedy rows have no noise.

        Args:
            logits: ``[T, vocab]`` float.
            rows, positions: ``[T]`` int64; a position is the index of the token drawn.

        Returns:
            ids ``[T, k]`` int64, and scores ``[T, k]`` float32, log-probability plus noise.
        """
        return self._source.sample(logits, rows, positions, k)

    def for_child(self, index: int, budget: Any = None) -> tuple[StepView, Drafts]:
        """The view of child ``index`` of ``Needs.children``, and drafts of its own to fill.

        Args:
            index: which child.
            budget: ``[B]`` int64 or None: most drafts the child may give; never more than its width.
        """
        if not self._needs.children:
            raise Undeclared("for_child: Needs has no children; declare them with Needs.union")
        child = self._needs.children[index]
        start = self._kv.start + sum(len(c.kv) for c in self._needs.children[:index])
        limits = dict(self._limits)
        if budget is not None:
            limits["budget"] = budget
        view = StepView(child, self._source, kv=range(start, start + len(child.kv)), limits=limits)
        return view, self._source.drafts(child)

    # -- the gate -------------------------------------------------------------------------------
    def _declared(self, name: str, declared: bool, remedy: str) -> None:
        if not declared:
            raise Undeclared(f"StepView.{name} was not declared: add {remedy} to Needs")

    def _rows(self, name: str) -> Any:
        return self._source.rows(name, self._needs.place)

    def _fed(self, name: str) -> Any:
        needs = self._needs
        declared = needs.tokens >= Tokens.NEW or bool(needs.taps) or bool(needs.kv)
        self._declared(name, declared, "tokens=NEW, taps or kv")
        return self._rows(name)

    def _limited(self, name: str, bound: int) -> Any:
        value = self._limits.get(name)
        if value is None:
            value = self._rows(name)
        return self._source.limit(name, value, bound, self._needs.place)
