"""Seats: what a step that waits for no host knows of its rows, in tensors that stay where they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import torch

from ..contract import Drafts
from ..engine.request import Request
from .rehearsal import distinct_tokens, own_blocks

#: Updates of the block tables that travel in one copy; more take several.
_UPDATES = 256


@attrs.frozen(kw_only=True)
class SeatShape:
    """Sizes of the seats; ``width`` and ``depth`` are 0 without speculation."""

    rows: int
    width: int
    depth: int
    tree: bool
    columns: int  #: of a block table; the last is never given a block
    block_size: int
    vocab_size: int
    history: int  #: tokens kept of each row; 0: none


@attrs.frozen(eq=False)
class StepInputs:
    """Inputs of a target step of ``B`` rows of ``T`` tokens: the last committed token, then drafts."""

    ids: torch.Tensor  #: ``[B, T]`` int64
    positions: torch.Tensor  #: ``[B, T]`` int64
    write_slots: torch.Tensor  #: ``[B, T]`` int64, physical
    base: torch.Tensor  #: ``[B, T]`` int64
    extra: torch.Tensor | None  #: ``[B, T, depth]`` int64, in trees
    lens: torch.Tensor  #: ``[B]`` int64, drafts to be verified
    parents: torch.Tensor  #: ``[B, T - 1]`` int64

    @classmethod
    def allocate(cls, shape: SeatShape, tokens: int, device: torch.device) -> StepInputs:
        def new(*size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int64, device=device)

        rows = shape.rows
        extra = new(rows, tokens, shape.depth).fill_(-1) if shape.tree and tokens > 1 else None
        grid = (rows, tokens)
        return cls(new(*grid), new(*grid), new(*grid), new(*grid), extra, new(rows), new(rows, tokens - 1))

    def first(self, rows: int) -> StepInputs:
        """Those of the first rows, which lie one behind the other."""
        extra = None if self.extra is None else self.extra[:rows]
        return StepInputs(
            self.ids[:rows],
            self.positions[:rows],
            self.write_slots[:rows],
            self.base[:rows],
            extra,
            self.lens[:rows],
            self.parents[:rows],
        )


@attrs.frozen(eq=False)
class StepResults:
    """What a step of ``B`` rows of ``T`` tokens committed."""

    tokens: torch.Tensor  #: ``[B, T]`` int64, committed ids; the last is repeated
    counts: torch.Tensor  #: ``[B]`` int64
    path: torch.Tensor  #: ``[B, T]`` int64: the place among T whose hidden state each was drawn from
    report: torch.Tensor  #: ``[B, T + 3]`` int32: count (-1: no token to draw), accepted, drafted, tokens

    @classmethod
    def allocate(cls, rows: int, tokens: int, device: torch.device) -> StepResults:
        def new(*size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        report = new(rows, tokens + 3, dtype=torch.int32)
        return cls(new(rows, tokens), new(rows), new(rows, tokens), report)

    def first(self, rows: int) -> StepResults:
        return StepResults(self.tokens[:rows], self.counts[:rows], self.path[:rows], self.report[:rows])


class Seats:
    """State of up to ``shape.rows`` rows; ``[B]`` int64 unless said otherwise.

    A request sits down with what the host knows of it, and its row then moves on by itself. A seat that is
    empty or whose row ended is not ``active``: it is computed along and changes nothing.
    """

    def __init__(self, shape: SeatShape, device: torch.device) -> None:
        self.shape = shape
        self.device = device
        rows, width = shape.rows, max(shape.width, 1)

        def column(dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(rows, dtype=dtype, device=device)

        self.committed = column() + 1  #: counts the last token, whose KV is not computed
        self.limit = column()
        self.active = column()  #: 0 or 1
        self.budget = column()  #: most drafts
        self.last = column()  #: the last token
        self.seed, self.index, self.top_k = column(), column(), column()
        self.adapter = column() - 1  #: the slot of its adapter; -1: none
        self.temperature, self.top_p, self.min_p = (column(torch.float32) for _ in range(3))
        self.table = torch.zeros(rows, shape.columns, dtype=torch.int64, device=device)
        self.history: torch.Tensor | None = None  #: ``[B, L]`` int32
        if shape.history:
            self.history = torch.zeros(rows, shape.history, dtype=torch.int32, device=device)
        self.chain = torch.arange(-1, width - 1, device=device).repeat(rows, 1)
        self.drafts = Drafts(  #: of the next step
            ids=torch.zeros(rows, width, dtype=torch.int64, device=device),
            lens=column(),
            parents=self.chain.clone(),
            score=torch.zeros(rows, width, device=device),
        )
        self.faults = torch.zeros(1, dtype=torch.int64, device=device)  #: drafts cut, so far
        self._row_of: dict[int, torch.Tensor] = {}
        self._adapted = [False] * rows  # of each seat, whether who sits there has an adapter
        self._known_blocks = [0] * rows  # of each seat, how many blocks the device knows

    @property
    def adapted(self) -> bool:
        """Whether anybody who sits has an adapter, as far as the host knows."""
        return any(self._adapted)

    def seat(self, requests: Mapping[int, Request], budgets: Sequence[int]) -> None:
        """Sit requests down, by seat, with their drafts; whoever sat there has ended.

        What is under way was enqueued before, and sees the seat as it was.
        """
        seated, shape = list(requests.values()), self.shape
        for row, request in requests.items():
            self._adapted[row] = request.adapter is not None
        rows = send(np.array(list(requests), np.int64), self.device)

        def put(columns: Sequence[torch.Tensor], values: Sequence[Sequence[float]], dtype: type) -> None:
            sent = send(np.array(values, dtype), self.device)
            for column, value in zip(columns, sent, strict=True):
                column.index_copy_(0, rows, value)

        params = [request.params for request in seated]
        put(
            (
                self.committed,
                self.limit,
                self.active,
                self.budget,
                self.last,
                self.seed,
                self.index,
                self.top_k,
                self.adapter,
            ),
            (
                [len(request.token_ids) for request in seated],
                [request.limit for request in seated],
                [1] * len(seated),
                budgets,
                [request.token_ids[-1] for request in seated],
                [request.seed for request in seated],
                [request.index for request in seated],
                [own.top_k if 0 < own.top_k < shape.vocab_size else 0 for own in params],
                [request.adapter_slot for request in seated],
            ),
            np.int64,
        )
        put(
            (self.temperature, self.top_p, self.min_p),
            (
                [0.0 if own.greedy else own.temperature for own in params],
                [own.top_p for own in params],
                [own.min_p for own in params],
            ),
            np.float32,
        )
        table = np.zeros((len(seated), shape.columns), np.int64)
        for place, (row, request) in enumerate(requests.items()):
            blocks = request.table.blocks
            table[place, : len(blocks)] = blocks
            self._known_blocks[row] = len(blocks)
        self.table.index_copy_(0, rows, send(table, self.device))
        if self.history is not None:
            longest = max(len(request.token_ids) for request in seated)
            texts = np.zeros((len(seated), longest), np.int32)
            for place, request in enumerate(seated):
                texts[place, : len(request.token_ids)] = request.token_ids
            self.history[:, :longest].index_copy_(0, rows, send(texts, self.device))
        if shape.width:
            ids, parents, lens = self._drafts_of(seated)
            self.drafts.ids.index_copy_(0, rows, send(ids, self.device))
            self.drafts.lens.index_copy_(0, rows, send(lens, self.device))
            if shape.tree:
                self.drafts.parents.index_copy_(0, rows, send(parents, self.device))

    def _drafts_of(self, requests: Sequence[Request | None]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """ids and parents ``[n, W]``, lens ``[n]`` of the drafts that requests have on the host."""
        count, width = len(requests), self.shape.width
        ids = np.zeros((count, width), np.int64)
        parents = np.tile(np.arange(-1, width - 1), (count, 1))
        lens = np.zeros(count, np.int64)
        for row, request in enumerate(requests):
            if request is not None and request.drafts:
                lens[row] = len(request.drafts)
                ids[row, : lens[row]] = request.drafts.ids
                parents[row, : lens[row]] = request.drafts.parents
        return ids, parents, lens

    def rehearse(self, width: int, num_blocks: int) -> None:
        """Fill the seats, which must be empty, with rows of a token that verify ``width`` drafts each.

        ``num_blocks``: of the pool, none of which anybody may hold.
        """
        shape = self.shape
        tokens = distinct_tokens(shape.rows * (1 + width), shape.vocab_size, self.device)
        tokens = tokens.view(shape.rows, 1 + width)
        self.table.copy_(own_blocks(shape.rows, shape.columns, num_blocks, self.device))
        self.committed.fill_(1)
        self.limit.fill_(width + 2)
        self.active.fill_(1)
        self.budget.fill_(width)
        self.last.copy_(tokens[:, 0])
        if width:
            self.drafts.ids[:, :width].copy_(tokens[:, 1:])
            self.drafts.parents.copy_(self.chain)
        self.drafts.lens.fill_(width)

    def clear(self) -> None:
        """Empty the seats, as they were at first."""
        self.committed.fill_(1)
        held = (self.limit, self.active, self.budget, self.last, self.table)
        for column in (*held, self.drafts.lens, self.drafts.ids):
            column.zero_()
        self.drafts.parents.copy_(self.chain)

    def row_of(self, rows: int, tokens: int) -> torch.Tensor:
        """``[rows * tokens]`` int64: the row of each token, for proposers."""
        if tokens not in self._row_of:
            self._row_of[tokens] = torch.arange(self.shape.rows, device=self.device).repeat_interleave(tokens)
        return self._row_of[tokens][: rows * tokens]

    def put_drafts(self, requests: Sequence[Request | None]) -> None:
        """Hand over the drafts that ``requests``, the first seats', have on the host."""
        ids, parents, lens = self._drafts_of(requests)
        count = len(requests)
        self.drafts.ids[:count].copy_(send(ids, self.device))
        self.drafts.lens[:count].copy_(send(lens, self.device))
        if self.shape.tree:
            self.drafts.parents[:count].copy_(send(parents, self.device))

    def set_budgets(self, budgets: Sequence[int], active: Sequence[bool]) -> None:
        """Most drafts of each seat; a seat that is not ``active`` is given up for good."""
        self._adapted = [has and any(active[row : row + 1]) for row, has in enumerate(self._adapted)]
        values = np.zeros((2, self.shape.rows), np.int64)
        values[0, : len(budgets)] = budgets
        values[1, : len(active)] = active
        sent = send(values, self.device)
        self.budget.copy_(sent[0])
        self.active.mul_(sent[1])

    def set_blocks(self, tables: Sequence[Sequence[int] | None]) -> None:
        """Tell the device of the blocks that the rows' tables grew by; None: nobody sits there."""
        news = [
            (row, column, blocks[column])
            for row, blocks in enumerate(tables)
            if blocks is not None
            for column in range(self._known_blocks[row], len(blocks))
        ]
        for start in range(0, len(news), _UPDATES):
            part = np.asarray(news[start : start + _UPDATES], np.int64)
            row, column, block = send(part.T.copy(), self.device)
            self.table.index_put_((row, column), block)
        for row, blocks in enumerate(tables):
            if blocks is not None:
                self._known_blocks[row] = len(blocks)


def send(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """``array`` on the device, without a wait: torch keeps the pinned copy until it has arrived."""
    host = torch.from_numpy(array)
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
