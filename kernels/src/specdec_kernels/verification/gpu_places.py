"""Where nodes and drafts stand, in Triton: what proposers are fed with and write to, and what moves."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from ..gpu import launch


@triton.jit
def physical(TABLE, slot, there, columns, BLOCK_SIZE: tl.constexpr):
    column = slot // BLOCK_SIZE
    block = tl.load(TABLE + column, mask=there & (column < columns), other=0).to(tl.int64)
    return tl.where(there, block * BLOCK_SIZE + slot % BLOCK_SIZE, 0)


@triton.jit(do_not_specialize=["B", "width", "depth"])
def _fed_inputs_kernel(
    COMMITTED,
    COUNTS,
    PATH,
    LIMIT,
    ACTIVE,
    BUDGET,
    OF_ROWS,
    OF_TOKENS,
    B,
    width,
    depth,
    T: tl.constexpr,
    T2: tl.constexpr,
    TREE: tl.constexpr,
    PDL: tl.constexpr,
):
    """``OF_ROWS``: ``[4, B]``, committed, last, room, budget; ``OF_TOKENS``: ``[2, B, T]``."""
    row = tl.program_id(0)
    column = tl.arange(0, T2)
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    committed, count = tl.load(COMMITTED + row), tl.load(COUNTS + row)
    room = tl.maximum(tl.load(LIMIT + row) - committed - 1, 0) * tl.load(ACTIVE + row)
    budget = tl.where(room > 0, tl.load(BUDGET + row), 0)
    if not TREE:
        budget = tl.minimum(budget, room)
    tl.store(OF_ROWS + row, committed)
    tl.store(OF_ROWS + B + row, (row * T).to(tl.int64) + tl.maximum(count - 1, 0))
    tl.store(OF_ROWS + 2 * B + row, tl.minimum(room, depth))
    tl.store(OF_ROWS + 3 * B + row, tl.minimum(budget, width))
    own = column < T
    at = row * T + column
    fed = committed - count + tl.minimum(column.to(tl.int64), count - 1)
    tl.store(OF_TOKENS + at, fed, mask=own)
    tl.store(OF_TOKENS + B * T + at, row * T + tl.load(PATH + at, mask=own, other=0), mask=own)


def fed_inputs(
    committed: torch.Tensor,
    counts: torch.Tensor,
    path: torch.Tensor,
    limit: torch.Tensor,
    active: torch.Tensor,
    budget: torch.Tensor,
    *,
    width: int,
    depth: int,
    tree: bool,
) -> dict[str, torch.Tensor]:
    """As :func:`specdec_kernels.verification.fed_inputs`; all tensors contiguous."""
    rows, tokens = path.shape
    of_rows, of_tokens = path.new_empty(4, rows), path.new_empty(2, rows * tokens)
    launch(
        _fed_inputs_kernel,
        (rows,),
        *(committed, counts, path, limit, active, budget, of_rows, of_tokens, rows, width, depth),
        T=tokens,
        T2=triton.next_power_of_2(tokens),
        TREE=tree,
        num_warps=1,
    )
    names = ("committed", "last", "room", "budget")
    return {**dict(zip(names, of_rows, strict=True)), "positions": of_tokens[0], "hidden": of_tokens[1]}


_PLACES = 128


@triton.jit(do_not_specialize=["tokens"])
def _places_kernel(
    ROWS,
    SLOTS,
    SEEN,
    EXTRA,
    COUNTS,
    TABLE,
    WRITE_SLOTS,
    POSITIONS,
    tokens,
    slot_stride,
    table_stride,
    columns,
    E: tl.constexpr,
    E2: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = token < tokens
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    row = tl.load(ROWS + token, mask=there, other=0)
    slot = tl.load(SLOTS + token * slot_stride, mask=there, other=0)
    position = tl.load(SEEN + token, mask=there, other=0) - 1
    if E > 0:
        entry = tl.arange(0, E2)[None, :]
        at = token[:, None] * E + entry
        extra = tl.load(EXTRA + at, mask=there[:, None] & (entry < E), other=-1)
        position += tl.sum((extra >= 0).to(tl.int64), 1)
    fed = there & (tl.load(COUNTS + row, mask=there, other=0) > 0)
    place = physical(TABLE + row * table_stride, slot, fed, columns, BLOCK_SIZE)
    tl.store(WRITE_SLOTS + token, place, mask=there)
    tl.store(POSITIONS + token, position, mask=there)


def draft_places(
    rows: torch.Tensor,
    slots: torch.Tensor,
    base: torch.Tensor,
    extra: torch.Tensor | None,
    counts: torch.Tensor,
    block_table: torch.Tensor,
    *,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`specdec_kernels.verification.draft_places`."""
    tokens = rows.shape[0]
    write_slots, positions = slots.new_empty(2, tokens)
    seen = 0 if extra is None else extra.shape[1]
    launch(
        _places_kernel,
        (triton.cdiv(tokens, _PLACES),),
        *(rows, slots, base, extra, counts, block_table, write_slots, positions),
        *(tokens, slots.stride(0), block_table.stride(0), block_table.shape[1]),
        E=seen,
        E2=triton.next_power_of_2(max(seen, 1)),
        BLOCK_SIZE=block_size,
        BLOCK=_PLACES,
        num_warps=4,
    )
    return write_slots, positions


@triton.jit
def _moves_kernel(
    COMMITTED, COUNTS, PATH, TABLE, SOURCE, DESTINATION, table_stride, columns,
    T: tl.constexpr, T2: tl.constexpr, BLOCK_SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    place = tl.arange(0, T2)  # of a level, from 0 on
    there = place < T - 1
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    count = tl.load(COUNTS + row)
    before = tl.load(COMMITTED + row) - count
    node = tl.load(PATH + row * T + 1 + place, mask=there, other=0) - 1
    moved = there & (place + 1 < count) & (node != place)
    at = row * (T - 1) + place
    table = TABLE + row * table_stride
    tl.store(SOURCE + at, physical(table, before + node, moved, columns, BLOCK_SIZE), mask=there)
    tl.store(DESTINATION + at, physical(table, before + place, moved, columns, BLOCK_SIZE), mask=there)


def accepted_moves(
    committed: torch.Tensor,
    counts: torch.Tensor,
    path: torch.Tensor,
    block_table: torch.Tensor,
    *,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`specdec_kernels.verification.accepted_moves`."""
    rows, tokens = path.shape
    source, destination = path.new_empty(2, rows * (tokens - 1))
    launch(
        _moves_kernel,
        (rows,),
        *(committed, counts, path, block_table, source, destination),
        *(block_table.stride(0), block_table.shape[1]),
        T=tokens,
        T2=triton.next_power_of_2(tokens),
        BLOCK_SIZE=block_size,
        num_warps=1,
    )
    return source, destination
