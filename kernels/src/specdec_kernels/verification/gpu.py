"""Verification in Triton: one launch each, one program a row.

Some hundred bytes a row are read and written: what these cost is a launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from ..gpu import launch
from ..noise.gpu import uniform_of
from .gpu_places import accepted_moves, draft_places, fed_inputs, physical
from .reference import ACCEPT_STREAM

__all__ = ["accept", "accepted_moves", "draft_places", "fed_inputs", "next_inputs"]

_STREAM = tl.constexpr(ACCEPT_STREAM)
_NONE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _accept_kernel(
    TARGETS,
    IDS,
    LENS,
    PARENTS,
    COMMITTED,
    LIMIT,
    ACTIVE,
    TOKENS,
    COUNTS,
    PATH,
    HISTORY,
    RESULT,
    LAST,
    RATES,
    SEED,
    history_size,
    T: tl.constexpr,
    T2: tl.constexpr,
    TREE: tl.constexpr,
    SYNTHETIC: tl.constexpr,
    HAS_HISTORY: tl.constexpr,
    HAS_LAST: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.arange(0, T2)
    is_draft = column < T - 1  # of column c, draft c, which stands in column c + 1
    TARGETS += row * T
    IDS += row * T
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    drafted = tl.load(LENS + row)
    committed = tl.load(COMMITTED + row)
    limit = tl.load(LIMIT + row)
    root = tl.load(IDS)
    draft = tl.load(IDS + column + 1, mask=is_draft, other=0)
    is_draft &= column < drafted
    if TREE:
        parent = tl.load(PARENTS + row * (T - 1) + column, mask=is_draft, other=-1)
        hit = is_draft & (draft == tl.load(TARGETS + parent + 1, mask=is_draft, other=-1))
        accepted = tl.zeros((), tl.int32)
        node = tl.full((), -1, tl.int32)
        reached = tl.zeros((T2,), tl.int32)
        token = tl.zeros((T2,), tl.int64)
        following = tl.min(tl.where(hit & (parent == node), column, _NONE), 0)
        while following != _NONE:
            token = tl.where(column == accepted, tl.sum(tl.where(column == following, draft, 0), 0), token)
            accepted += 1
            node = following
            reached = tl.where(column == accepted, node + 1, reached)
            following = tl.min(tl.where(hit & (parent == node) & (column > node), column, _NONE), 0)
    else:
        if SYNTHETIC:
            zero = tl.zeros_like(column).to(tl.uint32)
            position = (committed + column).to(tl.uint32)
            word, _b, _c, _d = tl.philox(tl.load(SEED + row), zero, position, zero, zero + _STREAM)
            hit = uniform_of(word) < tl.load(RATES + column, mask=is_draft, other=0.0)
        else:
            hit = draft == tl.load(TARGETS + column, mask=is_draft, other=-1)
        accepted = tl.min(tl.where(hit & is_draft, _NONE, column), 0)
        reached = column
        token = draft
        node = accepted - 1
    drawn = tl.load(TARGETS + node + 1)
    token = tl.where(column == accepted, drawn, token)
    active = tl.load(ACTIVE + row) != 0
    fails = active & (drawn < 0)
    active &= drawn >= 0
    accepted = tl.where(active, accepted, 0).to(tl.int64)
    count = tl.where(active, tl.maximum(tl.minimum(accepted + 1, limit - committed), 0), 0)
    last = tl.sum(tl.where(column == count - 1, token, 0), 0)
    last_reached = tl.sum(tl.where(column == count - 1, reached, 0), 0)
    token = tl.where(column < count, token, tl.where(count > 0, last, root))
    reached = tl.where(column < count, reached, last_reached)
    own = column < T
    tl.store(TOKENS + row * T + column, token, mask=own)
    tl.store(PATH + row * T + column, reached.to(tl.int64), mask=own)
    if HAS_HISTORY:
        place = committed + column
        new = (column < count) & (place < history_size)
        tl.store(HISTORY + row.to(tl.int64) * history_size + place, token.to(tl.int32), mask=new)
    RESULT += row * (T + 3)
    tl.store(RESULT, tl.where(fails, -1, count).to(tl.int32))
    tl.store(RESULT + 1, accepted.to(tl.int32))
    tl.store(RESULT + 2, drafted.to(tl.int32))
    tl.store(RESULT + 3 + column, token.to(tl.int32), mask=own)
    tl.store(COUNTS + row, count)
    if HAS_LAST:
        tl.store(LAST + row, tl.where(count > 0, last, root))
    tl.store(COMMITTED + row, committed + count)
    tl.store(ACTIVE + row, (active & (committed + count < limit)).to(tl.int64))


@triton.jit
def _next_inputs_kernel(
    LAST,
    DRAFTS,
    DRAFT_LENS,
    DRAFT_PARENTS,
    COMMITTED,
    LIMIT,
    ACTIVE,
    BUDGET,
    TABLE,
    IDS,
    LENS,
    PARENTS,
    POSITIONS,
    WRITE_SLOTS,
    BASE,
    EXTRA,
    FAULTS,
    drafts_stride,
    parents_stride,
    table_stride,
    columns,
    vocab_size,
    depth,
    T: tl.constexpr,
    T2: tl.constexpr,
    E: tl.constexpr,
    SEEN2: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TREE: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    W: tl.constexpr = T - 1
    node = tl.arange(0, T2)  # draft of the proposer; and column of the inputs
    DRAFTS += row * drafts_stride
    TABLE += row.to(tl.int64) * table_stride
    PARENTS += row * W
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    last = tl.load(LAST + row)
    committed = tl.load(COMMITTED + row)
    room = tl.load(LIMIT + row) - committed - 1
    active = tl.load(ACTIVE + row) != 0
    root = tl.maximum(committed - 1, 0)
    count = tl.zeros((), tl.int64)
    if W > 0:
        claimed = tl.minimum(tl.load(DRAFT_LENS + row), tl.load(BUDGET + row))
        claimed = tl.where(active != 0, tl.minimum(tl.maximum(claimed, 0), W), 0)
        draft = tl.load(DRAFTS + node, mask=node < W, other=-1)
        good = (node < claimed) & (draft >= 0) & (draft < vocab_size)
        above = (node - 1).to(tl.int64)
        if TREE:
            DRAFT_PARENTS += row * parents_stride
            above = tl.load(DRAFT_PARENTS + node, mask=node < W, other=-1)
            good &= (above >= -1) & (above < node)
        taken = tl.min(tl.where(good, T2, node), 0)  # up to the first bad one
        cut = (node >= taken) & (node < claimed)
        one = tl.full((T2,), 1, tl.int64)
        tl.atomic_add(FAULTS + tl.zeros_like(node), one, mask=cut, sem="relaxed")
        good = node < taken
        room = tl.minimum(room, depth)
        level = (node + 1).to(tl.int64)
        place = node
        if TREE:
            level = tl.full((T2,), 1, tl.int64)
            up = tl.where(good, above, -1)
            for _ in range(depth):
                level += (up >= 0).to(tl.int64)
                up = tl.load(DRAFT_PARENTS + up, mask=up >= 0, other=-1)
        kept = good & (level <= room)
        count = tl.sum(kept.to(tl.int64), 0)
        if TREE:
            # What is left closes ranks; each node finds its parent's new place where the results will stand.
            place = tl.cumsum(kept.to(tl.int32), 0) - 1
            tl.store(PARENTS + node, place.to(tl.int64), mask=kept)
            tl.debug_barrier()
            over = tl.load(PARENTS + above, mask=kept & (above >= 0), other=-1)
            if HAS_EXTRA:
                EXTRA += row * (T * E)
                seen = tl.arange(0, SEEN2)
                tl.store(EXTRA + seen, tl.full((SEEN2,), -1, tl.int64), mask=seen < T * E)
                tl.debug_barrier()
                own = EXTRA + (place + 1) * E - 1
                tl.store(own + level, committed + place, mask=kept)
                up = tl.where(kept, above, -1)
                behind = level - 1
                for _ in range(depth - 1):
                    there = tl.load(PARENTS + up, mask=up >= 0, other=0)
                    tl.store(own + behind, committed + there, mask=up >= 0)
                    up = tl.load(DRAFT_PARENTS + up, mask=up >= 0, other=-1)
                    behind -= 1
            tl.debug_barrier()
            tl.store(PARENTS + place, over, mask=kept)
        else:
            tl.store(PARENTS + place, above, mask=kept)
        tl.store(PARENTS + node, tl.full((T2,), -1, tl.int64), mask=(node >= count) & (node < W))
        at = row * T + 1 + place
        slot = committed + place
        tl.store(IDS + at, draft, mask=kept)
        tl.store(POSITIONS + at, root + level, mask=kept)
        tl.store(WRITE_SLOTS + at, physical(TABLE, slot, kept, columns, BLOCK_SIZE), mask=kept)
        seen_before = committed + tl.zeros((T2,), tl.int64)
        if not HAS_EXTRA:
            seen_before += level
        tl.store(BASE + at, seen_before, mask=kept)
    else:
        if HAS_EXTRA:
            seen = tl.arange(0, SEEN2)
            tl.store(EXTRA + row * (T * E) + seen, tl.full((SEEN2,), -1, tl.int64), mask=seen < T * E)
    tl.store(LENS + row, count)
    rest = (node < T) & ((node == 0) | (node > count))
    at = row * T + node
    nothing = tl.zeros((T2,), tl.int64)
    tl.store(IDS + at, last + nothing, mask=rest)
    tl.store(POSITIONS + at, root + nothing, mask=rest)
    slots = physical(TABLE, root + nothing, node < active, columns, BLOCK_SIZE)
    tl.store(WRITE_SLOTS + at, slots, mask=rest)
    tl.store(BASE + at, committed + nothing, mask=rest)


def accept(
    targets: torch.Tensor,
    ids: torch.Tensor,
    lens: torch.Tensor,
    parents: torch.Tensor | None,
    committed: torch.Tensor,
    limit: torch.Tensor,
    active: torch.Tensor,
    *,
    tokens: torch.Tensor,
    counts: torch.Tensor,
    path: torch.Tensor,
    history: torch.Tensor | None,
    result: torch.Tensor,
    last: torch.Tensor | None = None,
    rates: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
) -> None:
    """As :func:`specdec_kernels.verification.accept`; all tensors contiguous."""
    rows, columns = ids.shape
    launch(
        _accept_kernel,
        (rows,),
        *(targets, ids, lens, parents, committed, limit, active),
        *(tokens, counts, path, history, result, last, rates, seed),
        1 if history is None else history.shape[1],
        T=columns,
        T2=triton.next_power_of_2(columns),
        TREE=parents is not None and rates is None,
        SYNTHETIC=rates is not None,
        HAS_HISTORY=history is not None,
        HAS_LAST=last is not None,
        num_warps=1,
    )


def next_inputs(
    last: torch.Tensor,
    draft_ids: torch.Tensor,
    draft_lens: torch.Tensor,
    draft_parents: torch.Tensor | None,
    committed: torch.Tensor,
    limit: torch.Tensor,
    active: torch.Tensor,
    budget: torch.Tensor,
    block_table: torch.Tensor,
    *,
    block_size: int,
    vocab_size: int,
    depth: int,
    ids: torch.Tensor,
    lens: torch.Tensor,
    parents: torch.Tensor,
    positions: torch.Tensor,
    write_slots: torch.Tensor,
    base: torch.Tensor,
    extra: torch.Tensor | None = None,
    faults: torch.Tensor,
) -> None:
    """As :func:`specdec_kernels.verification.next_inputs`; what it writes is contiguous."""
    rows, columns = ids.shape
    seen = 0 if extra is None else extra.shape[2]
    launch(
        _next_inputs_kernel,
        (rows,),
        *(last, draft_ids, draft_lens, draft_parents, committed, limit, active, budget, block_table),
        *(ids, lens, parents, positions, write_slots, base, extra, faults),
        draft_ids.stride(0),
        0 if draft_parents is None else draft_parents.stride(0),
        block_table.stride(0),
        block_table.shape[1],
        vocab_size,
        depth,
        T=columns,
        T2=triton.next_power_of_2(columns),
        E=seen,
        SEEN2=triton.next_power_of_2(max(columns * seen, 1)),
        BLOCK_SIZE=block_size,
        TREE=draft_parents is not None,
        HAS_EXTRA=extra is not None,
        num_warps=1,
    )
