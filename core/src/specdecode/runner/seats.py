"""Seats: what a step that waits for no host knows of its rows, in tensors that stay where they are."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import torch

from ..contract import Drafts
from ..engine.request import Request

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

    Requests sit down together, when nothing is under way, and their rows then move on by themselves. A
    seat that is empty or whose row ended is not ``active``: it is computed along and changes nothing.
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
        self._known_blocks: list[int] = []  # of each seat, how many blocks the device knows

    def seat(self, requests: Sequence[Request], budgets: Sequence[int]) -> None:
        """Sit ``requests`` down with their drafts; nothing may be under way."""
        count, shape = len(requests), self.shape
        table = np.zeros((shape.rows, shape.columns), np.int64)
        for row, request in enumerate(requests):
            table[row, : len(request.table.blocks)] = request.table.blocks
        self._known_blocks = [len(request.table.blocks) for request in requests]
        self.table.copy_(torch.from_numpy(table))

        def put(column: torch.Tensor, values: Sequence[float], rest: int = 0) -> None:
            padded = torch.full((shape.rows,), rest, dtype=column.dtype)
            padded[:count] = torch.tensor(values, dtype=column.dtype)
            column.copy_(padded)

        params = [request.params for request in requests]
        put(self.committed, [len(request.token_ids) for request in requests], 1)
        put(self.limit, [request.limit for request in requests])
        put(self.active, [1] * count)
        put(self.budget, budgets)
        put(self.last, [request.token_ids[-1] for request in requests])
        put(self.seed, [request.seed for request in requests])
        put(self.index, [request.index for request in requests])
        put(self.temperature, [0.0 if own.greedy else own.temperature for own in params])
        put(self.top_k, [own.top_k if 0 < own.top_k < shape.vocab_size else 0 for own in params])
        put(self.top_p, [own.top_p for own in params], 1)
        put(self.min_p, [own.min_p for own in params])
        if self.history is not None:
            longest = max(len(request.token_ids) for request in requests)
            texts = np.zeros((count, longest), np.int32)
            for row, request in enumerate(requests):
                texts[row, : len(request.token_ids)] = request.token_ids
            self.history[:count, :longest] = torch.from_numpy(texts).to(self.device)
        self.put_drafts(requests)

    def put_drafts(self, requests: Sequence[Request | None]) -> None:
        """Hand over the drafts that ``requests``, by seat, have on the host."""
        shape = self.shape
        if not shape.width:
            return
        ids = np.zeros((shape.rows, shape.width), np.int64)
        parents = np.tile(np.arange(-1, shape.width - 1), (shape.rows, 1))
        lens = np.zeros(shape.rows, np.int64)
        for row, request in enumerate(requests):
            if request is not None and request.drafts:
                lens[row] = len(request.drafts)
                ids[row, : lens[row]] = request.drafts.ids
                parents[row, : lens[row]] = request.drafts.parents
        self.drafts.ids.copy_(send(ids, self.device))
        self.drafts.lens.copy_(send(lens, self.device))
        if shape.tree:
            self.drafts.parents.copy_(send(parents, self.device))

    def set_budgets(self, budgets: Sequence[int], active: Sequence[bool]) -> None:
        """Most drafts of each seat; a seat that is not ``active`` is given up for good."""
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
            for row, (blocks, known) in enumerate(zip(tables, self._known_blocks, strict=True))
            if blocks is not None
            for column in range(known, len(blocks))
        ]
        for start in range(0, len(news), _UPDATES):
            part = np.asarray(news[start : start + _UPDATES], np.int64)
            row, column, block = send(part.T.copy(), self.device)
            self.table.index_put_((row, column), block)
        for row, blocks in enumerate(tables):
            if blocks is not None:
                self._known_blocks[row] = len(blocks)

    def physical(self, rows: torch.Tensor, slots: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        """Physical slots, the null block's where not ``valid`` and beyond the tables; all of one shape."""
        size = self.shape.block_size
        column = (slots // size).clamp(0, self.shape.columns - 1)
        blocks = torch.where(valid, self.table[rows, column], 0)
        return blocks * size + slots % size


def send(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """``array`` on the device, without a wait: torch keeps the pinned copy until it has arrived."""
    host = torch.from_numpy(array)
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
