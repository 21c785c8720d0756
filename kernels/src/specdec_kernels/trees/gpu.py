"""Growing trees in Triton: a launch a level and one for the choice. The floor is a launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from ..gpu import launch
from .candidates import Candidates, Level, Tree, first_candidate

#: Children of a level and candidates that a program holds in registers.
_MOST_CHILDREN, _MOST_CANDIDATES = 1024, 4096
#: Candidates that are compared with all at a time.
_COMPARED = 16


def can_extend(scores: torch.Tensor) -> bool:
    """Whether a level's children fit into a program."""
    nodes, fanout = scores.shape[1:]
    return triton.next_power_of_2(nodes) * triton.next_power_of_2(fanout) <= _MOST_CHILDREN


def can_keep(candidates: Candidates) -> bool:
    """Whether all candidates do."""
    return candidates.scores.shape[1] <= _MOST_CANDIDATES


def extend(candidates: Candidates, above: Level | None, ids: torch.Tensor, scores: torch.Tensor) -> Level:
    batch, nodes, fanout = ids.shape
    levels = 0 if above is None else above.paths.shape[2]
    numbers = ids.new_empty((3, batch, fanout))
    level = Level(
        ids=numbers[0],
        total=scores.new_empty((batch, fanout)),
        nodes=numbers[1],
        rows=numbers[2].flatten(),
        paths=ids.new_empty((batch, fanout, levels + 1)),
    )
    before = level if above is None else above
    padded = triton.next_power_of_2(nodes), triton.next_power_of_2(fanout)
    launch(
        _extend_kernel,
        (batch,),
        *(candidates.ids, candidates.scores, candidates.parents, candidates.ids.shape[1]),
        *(before.total, before.nodes, before.paths),
        *(ids.contiguous(), scores.contiguous()),
        *(level.ids, level.total, level.nodes, level.rows, level.paths),
        candidates.first,
        first_candidate(fanout, levels + 1),
        NODES=nodes,
        FANOUT=fanout,
        LEVELS=levels,
        NODES2=padded[0],
        FANOUT2=padded[1],
        num_warps=1 if padded[0] * padded[1] <= 128 else 4,
    )
    return level


def keep(
    candidates: Candidates,
    room: torch.Tensor,
    width: int,
    budget: torch.Tensor | None = None,
    out: Tree | None = None,
) -> Tree:
    batch, count = candidates.ids.shape
    tree = out
    if tree is None:
        numbers = candidates.ids.new_empty((2, batch, width))
        tree = Tree(ids=numbers[0], parents=numbers[1], lens=candidates.ids.new_empty(batch))
    padded = max(_COMPARED, triton.next_power_of_2(count))
    launch(
        _keep_kernel,
        (batch,),
        *(candidates.ids, candidates.scores, candidates.parents, room, budget),
        *(tree.ids, tree.parents, tree.lens, tree.ids.stride(0), tree.parents.stride(0)),
        torch.empty((batch, count), dtype=torch.int32, device=room.device),
        count,
        width,
        FANOUT=candidates.fanout,
        COUNT2=padded,
        COMPARED=_COMPARED,
        num_warps=4 if padded <= 512 else 8,
    )
    return tree


@triton.jit
def _extend_kernel(
    ALL_IDS, ALL_SCORES, ALL_PARENTS, count, TOTAL, ABOVE, PATHS, IDS, SCORES,
    OUT_IDS, OUT_TOTAL, OUT_NODES, OUT_ROWS, OUT_PATHS, ENTRY, first,
    NODES: tl.constexpr, FANOUT: tl.constexpr, LEVELS: tl.constexpr, NODES2: tl.constexpr,
    FANOUT2: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    node, child = tl.arange(0, NODES2)[:, None], tl.arange(0, FANOUT2)[None, :]
    there = (node < NODES) & (child < FANOUT)
    place = node * FANOUT + child
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    children = row * (NODES * FANOUT)
    scores = tl.load(SCORES + children + place, mask=there, other=-float("inf"))
    ids = tl.load(IDS + children + place, mask=there, other=0)

    # Log-confidences, then those of the paths.
    broken = tl.max(((scores != scores) | (scores == float("inf"))).to(tl.int32), 1)[:, None] > 0
    scores = tl.where(broken, -float("inf"), scores)
    top = tl.max(scores, 1)[:, None]
    finite = tl.where(top == -float("inf"), 0.0, top)
    mass = tl.sum(tl.exp(scores - finite), 1)[:, None]
    most = tl.maximum(finite + tl.log(tl.where(mass == 0.0, 1.0, mass)), 0.0)
    total = tl.minimum(scores - most, 0.0)
    parent = tl.full((NODES2, 1), -1, tl.int64)
    if LEVELS > 0:
        known = node < NODES
        total += tl.load(TOTAL + row * FANOUT + node, mask=known, other=-float("inf"))
        parent = tl.load(ABOVE + row * FANOUT + node, mask=known, other=-1)
    at = row * count + first + place
    tl.store(ALL_IDS + at, ids, mask=there)
    tl.store(ALL_SCORES + at, total, mask=there)
    tl.store(ALL_PARENTS + at, tl.broadcast_to(parent, (NODES2, FANOUT2)), mask=there)

    # The best go on; of equals the first.
    free = there
    entry = LEVELS * FANOUT
    if ENTRY is not None:
        entry += tl.load(ENTRY + row)
    for j in range(FANOUT):
        best = tl.max(tl.max(tl.where(free, total, -float("inf")), 1), 0)
        equal = tl.where(free & (total == best), place, NODES * FANOUT)
        chosen = tl.min(tl.min(equal, 1), 0)
        free = free & (place != chosen)
        out = row * FANOUT + j
        tl.store(OUT_IDS + out, tl.sum(tl.sum(tl.where(place == chosen, ids, 0), 1), 0))
        tl.store(OUT_TOTAL + out, best)
        tl.store(OUT_NODES + out, (first + chosen).to(tl.int64))
        tl.store(OUT_ROWS + out, row * NODES + chosen // FANOUT)
        path = OUT_PATHS + out * (LEVELS + 1)
        for level in range(LEVELS):
            above = tl.load(PATHS + (row * FANOUT + chosen // FANOUT) * LEVELS + level)
            tl.store(path + level, above)
        tl.store(path + LEVELS, entry + j)


@triton.jit
def _keep_kernel(
    ALL_IDS, ALL_SCORES, ALL_PARENTS, ROOM, BUDGET, OUT_IDS, OUT_PARENTS, LENS, ids_stride, parents_stride,
    RANKS, count, width,
    FANOUT: tl.constexpr, COUNT2: tl.constexpr, COMPARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, COUNT2)
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    room = tl.load(ROOM + row)
    own = row * count
    scores = _within(ALL_SCORES + own, i, count, room, FANOUT)
    # How many come before each: those that score above it, and the older ones that score the same.
    rank = tl.zeros((COUNT2,), tl.int32)
    for start in range(0, count, COMPARED):
        j = start + tl.arange(0, COMPARED)
        other = _within(ALL_SCORES + own, j, count, room, FANOUT)[None, :]
        ahead = (other > scores[:, None]) | ((other == scores[:, None]) & (j[None, :] < i[:, None]))
        rank += tl.sum((ahead & (j < count)[None, :]).to(tl.int32), 1)
    there = i < count
    tl.store(RANKS + own + i, rank, mask=there)
    tl.debug_barrier()  # ranks are read by others than wrote them
    kept = there & (rank < width)
    parent = tl.load(ALL_PARENTS + own + i, mask=kept, other=-1)
    above = tl.load(RANKS + own + parent, mask=kept & (parent >= 0), other=-1).to(tl.int64)
    tl.store(OUT_IDS + row * ids_stride + rank, tl.load(ALL_IDS + own + i, mask=kept, other=0), mask=kept)
    tl.store(OUT_PARENTS + row * parents_stride + rank, above, mask=kept)
    length = tl.sum((kept & (scores > -float("inf"))).to(tl.int64), 0)
    if BUDGET is not None:
        length = tl.minimum(length, tl.load(BUDGET + row))
    tl.store(LENS + row, length)


@triton.jit
def _within(SCORES, i, count, room, FANOUT: tl.constexpr):
    """Scores of candidates; -inf of those on levels for which there is no room."""
    level = (i + FANOUT * (FANOUT - 1)) // (FANOUT * FANOUT)  # as if the first had as many as the others
    return tl.load(SCORES + i, mask=(i < count) & (level < room), other=-float("inf"))
