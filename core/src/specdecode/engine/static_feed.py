"""What a proposer is fed after a step over the seats: tensors of static shape, read by nobody on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from specdec_kernels import sampling
from specdec_kernels.attention import AttentionMetadata

from ..contract import Drafts, KVSpec, Needs, Place, Tap, Unsupported
from ..runner.seats import Seats
from ..runner.steady import SteadyOutput
from .feed import make_drafts
from .request import Request


class StaticFeed:
    """Implements :class:`~specdecode.contract.StepSource` over a steady step of ``B`` rows of ``T`` tokens.

    Each row is fed ``T`` tokens: those it committed, then the last of them again. What is fed twice is
    computed twice and written to one place, so padding needs no case of its own.
    """

    def __init__(
        self,
        step: SteadyOutput,
        seats: Seats,
        *,
        kv: Sequence[KVSpec],
        max_slots: int | None,
        requests: Sequence[Request | None],
        check: Callable[[torch.Tensor], None] | None,
    ) -> None:
        """``requests``: who sits there, for proposers that are not captured."""
        self._step = step
        self._seats = seats
        self._kv = kv
        self._max_slots = max_slots
        self._requests = requests
        self._check = check
        self._committed = seats.committed[: step.rows]
        self._counts = step.results.counts
        self._made: dict[str, torch.Tensor] = {}

    # -- StepSource -----------------------------------------------------------------------------
    def rows(self, name: str, place: Place) -> Any:
        if name in _OF_REQUESTS:
            return _OF_REQUESTS[name](self._requests)
        if name not in self._made:
            self._made[name] = _READ[name](self)
        return self._made[name]

    def own_len(self, kv: range, place: Place) -> torch.Tensor:
        return self._committed - self._counts

    def taps(self, taps: tuple[Tap, ...]) -> tuple[torch.Tensor, ...]:
        """Token ``k`` of a row was drawn from the hidden state at ``path[k]``, that of its position - 1."""
        step = self._step
        first = torch.arange(step.rows, device=self._seats.device)[:, None] * step.tokens
        where = (first + step.results.path).flatten()
        return tuple(step.taps[tap][where] for tap in taps)

    def ctx(self, kv: int, rows: Any, slots: Any, base: Any, extra: Any) -> AttentionMetadata:
        tokens, rest = divmod(rows.shape[0], self._step.rows)
        if rest:
            raise ValueError(
                f"in a static step every row has the same number of tokens, got {rows.shape[0]} for "
                f"{self._step.rows} rows"
            )
        # A row that took no token has nothing to feed: its entries are true already.
        write = self._seats.physical(rows, slots, self._counts[rows] > 0)
        if self._check is not None:
            self._check(write)
        level = 0 if extra is None else (extra >= 0).sum(1)  # a node's ancestors and itself
        return AttentionMetadata(
            rows=rows,
            positions=base - 1 + level,
            write_slots=write,
            base=base,
            block_table=self._seats.table[: self._step.rows],
            block_size=self._seats.shape.block_size,
            first=self._kv[kv].first,
            extra=extra,
            tokens_per_row=tokens,
            max_slots=self._max_slots,
        )

    def sample(self, logits: Any, rows: Any, positions: Any, k: int) -> tuple[Any, Any]:
        seats, count = self._seats, self._step.rows
        return sampling.rank_tokens(
            logits,
            positions,
            seed=seats.seed[:count],
            index=seats.index[:count],
            temperature=seats.temperature[:count],
            top_k=seats.top_k[:count],
            top_p=seats.top_p[:count],
            min_p=seats.min_p[:count],
            tokens_per_row=rows.shape[0] // count,
            k=k,
        )

    def probs(self, logits: Any, rows: Any, positions: Any, ids: Any) -> Any:
        raise Unsupported("rules that weigh probabilities run in the plain order")

    def drafts(self, needs: Needs) -> Drafts:
        return make_drafts(needs, self._step.rows, self._seats.shape.vocab_size, self._seats.device)

    def limit(self, name: str, value: Any, bound: int, place: Place) -> Any:
        return value.clamp(max=bound)

    # -- what is shown --------------------------------------------------------------------------
    def _room(self) -> torch.Tensor:
        limit, active = self._seats.limit[: self._step.rows], self._seats.active[: self._step.rows]
        return (limit - self._committed - 1).clamp(min=0) * active

    def _budget(self) -> torch.Tensor:
        budget = torch.where(self._room() > 0, self._seats.budget[: self._step.rows], 0)
        return budget if self._seats.shape.tree else torch.minimum(budget, self._room())

    def _fed(self) -> torch.Tensor:
        """``[B, T]``: which of the row's committed tokens is fed; the last again where there are no more."""
        place = torch.arange(self._step.tokens, device=self._seats.device)
        return torch.minimum(place, (self._counts - 1)[:, None])

    def _positions(self) -> torch.Tensor:
        return ((self._committed - self._counts)[:, None] + self._fed()).flatten()

    def _last(self) -> torch.Tensor:
        first = torch.arange(self._step.rows, device=self._seats.device) * self._step.tokens
        return first + (self._counts - 1).clamp(min=0)

    def _row_of(self) -> torch.Tensor:
        rows = torch.arange(self._step.rows, device=self._seats.device)
        return rows.repeat_interleave(self._step.tokens)


_READ: dict[str, Callable[[StaticFeed], Any]] = {
    # Copies of what the engine goes on with: a proposer may write into what it is shown.
    "committed_len": lambda feed: feed._committed.clone(),
    "budget": StaticFeed._budget,
    "room": StaticFeed._room,
    "last_token": lambda feed: feed._seats.last[: feed._step.rows].clone(),
    "history": lambda feed: feed._seats.history[: feed._step.rows],  # type: ignore[index]
    "ids": lambda feed: feed._step.results.tokens.flatten(),
    "positions": StaticFeed._positions,
    "rows": StaticFeed._row_of,
    "last": StaticFeed._last,
}

_OF_REQUESTS: dict[str, Callable[[Sequence[Request | None]], Any]] = {
    "request_ids": lambda requests: ["" if request is None else request.id for request in requests],
    "params": lambda requests: [None if request is None else request.params for request in requests],
    "allowed": lambda requests: None,  # requests with a grammar do not take seats
}
