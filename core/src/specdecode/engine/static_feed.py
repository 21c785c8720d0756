"""What a proposer is fed after a step over the seats: tensors of static shape, read by nobody on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from specdec_kernels import projection, sampling, verification
from specdec_kernels.attention import AttentionMetadata

from ..contract import Drafts, KVSpec, Needs, Place, Tap, Unsupported
from ..runner.seats import Seats
from ..runner.steady import SteadyOutput
from .continuing import behind
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
        self._told: dict[str, torch.Tensor] | None = None

    # -- StepSource -----------------------------------------------------------------------------
    @property
    def width(self) -> int:
        return self._step.tokens - 1  # as many as the step verified: those of the next one

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
        joined = projection.gather([self._step.taps[tap] for tap in taps], self._fed("hidden"))
        return joined.chunk(len(taps), 1)

    def ctx(self, kv: int, rows: Any, slots: Any, base: Any, extra: Any) -> AttentionMetadata:
        tokens, rest = divmod(rows.shape[0], self._step.rows)
        if rest:
            raise ValueError(
                f"in a static step every row has the same number of tokens, got {rows.shape[0]} for "
                f"{self._step.rows} rows"
            )
        table, size = self._seats.table[: self._step.rows], self._seats.shape.block_size
        # A row that took no token has nothing to feed: its entries are true already.
        write, positions = verification.draft_places(
            rows, slots, base, extra, self._counts, table, block_size=size
        )
        if self._check is not None:
            self._check(write)
        return AttentionMetadata(
            rows=rows,
            positions=positions,
            write_slots=write,
            base=base,
            block_table=table,
            block_size=size,
            first=self._kv[kv].first,
            extra=extra,
            tokens_per_row=tokens,
            max_slots=self._max_slots,
        )

    def sample(self, logits: Any, rows: Any, positions: Any, k: int, vocabulary: Any) -> tuple[Any, Any]:
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
            ids=vocabulary,
        )

    def probs(self, logits: Any, rows: Any, positions: Any, ids: Any, vocabulary: Any) -> Any:
        raise Unsupported("rules that weigh probabilities run in the plain order")

    def drafts(self, needs: Needs) -> Drafts:
        return make_drafts(needs, self._step.rows, self._seats.shape.vocab_size, self._seats.device)

    def limit(self, name: str, value: Any, bound: int, place: Place) -> Any:
        shape = self._seats.shape
        whole = {"budget": shape.width, "room": shape.depth}[name]
        return value if value is self._fed(name) and bound >= whole else value.clamp(max=bound)

    def behind(self, name: str, drafts: Sequence[Drafts], place: Place) -> Any:
        return behind(self, name, drafts, place)

    # -- what is shown --------------------------------------------------------------------------
    def _fed(self, name: str) -> torch.Tensor:
        """One of :func:`specdec_kernels.verification.fed_inputs`, copies of what the engine goes on with."""
        if self._told is None:
            seats, rows = self._seats, self._step.rows
            self._told = verification.fed_inputs(
                self._committed,
                self._counts,
                self._step.results.path,
                seats.limit[:rows],
                seats.active[:rows],
                seats.budget[:rows],
                width=max(seats.shape.width, 1),
                depth=max(seats.shape.depth, 1),
                tree=seats.shape.tree,
            )
        return self._told[name]


_READ: dict[str, Callable[[StaticFeed], Any]] = {
    # Copies of what the engine goes on with: a proposer may write into what it is shown.
    "committed_len": lambda feed: feed._fed("committed"),
    "budget": lambda feed: feed._fed("budget"),
    "room": lambda feed: feed._fed("room"),
    "last_token": lambda feed: feed._seats.last[: feed._step.rows].clone(),
    "history": lambda feed: feed._seats.history[: feed._step.rows],  # type: ignore[index]
    "ids": lambda feed: feed._step.results.tokens.flatten(),
    "positions": lambda feed: feed._fed("positions"),
    "rows": lambda feed: feed._seats.row_of(feed._step.rows, feed._step.tokens),
    "last": lambda feed: feed._fed("last"),
}

_OF_REQUESTS: dict[str, Callable[[Sequence[Request | None]], Any]] = {
    "request_ids": lambda requests: ["" if request is None else request.id for request in requests],
    "params": lambda requests: [None if request is None else request.params for request in requests],
    "allowed": lambda requests: None,  # requests with a grammar do not take seats
}
