"""Which experts a token takes, and which rows an expert has, as kernels."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from ..projection.mainloop import partial_squares, prefetch, reciprocal_rms
from .gpu_mainloop import accumulate


@triton.jit(do_not_specialize=["M", "ahead"])
def router_kernel(
    W,
    X,
    SQUARES,
    stride,
    LOGITS,
    M,
    ahead,
    eps,
    E: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    B: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """``LOGITS = X W^T`` over the tokens' RMS, float32: ``ROWS`` experts of ``B`` tokens."""
    expert = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rows = tl.minimum(expert, E - 1)
    if PDL:
        prefetch(W, rows, ahead, K, ROWS, 1, "")
        cuda.gdc_wait()
    m = tl.program_id(1) * B + tl.arange(0, B)
    squares = partial_squares(SQUARES, stride, m, M, K, B)
    w = W + rows.to(tl.int64)[:, None] * K
    x = X + m.to(tl.int64)[None, :] * K
    a = accumulate(w, x, m < M, K, ROWS, B, BK, STAGES, "", PDL)
    a *= reciprocal_rms(squares, eps, K, B)
    at = m.to(tl.int64)[None, :] * E + expert[:, None]
    tl.store(LOGITS + at, a, mask=(expert < E)[:, None] & (m < M)[None, :])


@triton.jit(do_not_specialize=["M", "MOST"])
def choose_kernel(
    LOGITS,
    IDS,
    WEIGHTS,
    ORDER,
    TILES,
    M,
    MOST,
    E: tl.constexpr,
    COUNT: tl.constexpr,
    NORMALIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The ``COUNT`` likeliest experts of ``TOKENS`` tokens, of equal ones the first, and their weights.

    With ``ORDER`` these are all tokens, and their choices are grouped, as of :func:`group_kernel`.
    """
    m = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    e = tl.arange(0, BLOCK)[None, :]
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    there = (m < M)[:, None] & (e < E)
    logits = tl.load(LOGITS + m.to(tl.int64)[:, None] * E + e, mask=there, other=float("-inf"))
    logits = tl.where(logits == logits, logits, float("-inf"))  # of NaN alone: NaN shares
    top = tl.max(logits, 1)
    # of a token in a tile of one size, so in one order
    all_shares = tl.sum(tl.exp(logits - top[:, None]), 1)
    slot = tl.arange(0, SLOTS)[None, :]
    ids = tl.zeros((TOKENS, SLOTS), tl.int32) + E
    shares = tl.zeros((TOKENS, SLOTS), tl.float32)
    total = tl.zeros((TOKENS,), tl.float32)
    for place in tl.static_range(COUNT):
        logit, best = tl.max(logits, 1, return_indices=True)
        share = tl.exp(logit - top)
        logits = tl.where(e == best[:, None], float("-inf"), logits)
        ids = tl.where(slot == place, best[:, None], ids)
        shares = tl.where(slot == place, share[:, None], shares)
        total += share
    if not NORMALIZE:
        total = all_shares
    known = (m < M)[:, None] & (slot < COUNT)
    at = m[:, None] * COUNT + slot
    tl.store(WEIGHTS + at, shares / total[:, None], mask=known)
    if ORDER is None:
        tl.store(IDS + at, ids, mask=known)
    else:
        _group(tl.where(known, ids, E), at, ORDER, TILES, MOST, E, TOKENS * SLOTS)


@triton.jit
def _group(ids, choices, ORDER, TILES, MOST, E: tl.constexpr, N: tl.constexpr):
    """What :func:`group_kernel` finds, of so few tokens that an expert's rows are one tile: all at one time.

    ``ids``: of ``N`` choices in the order of their numbers ``choices``; ``E`` where there is none.
    """
    mine = tl.reshape(ids, (N,))
    choice = tl.reshape(choices, (N,))
    place = tl.arange(0, N)
    # each against all: sums over the first axis, which is in a thread's own registers
    alike = mine[:, None] == mine[None, :]
    less = mine[:, None] < mine[None, :]
    earlier = place[:, None] < place[None, :]
    row = tl.sum((less | (alike & earlier)).to(tl.int32), 0)
    count = tl.sum(alike.to(tl.int32), 0)
    first = tl.sum((alike & earlier).to(tl.int32), 0) == 0
    tile = tl.sum((less & first[:, None]).to(tl.int32), 0)
    known = mine < E
    # Tiles that are not there are marked first, not counted: Triton 3.6 adds a reshaped block up wrongly
    # where several threads of a warp hold the same of it.
    tl.store(TILES + 3 * place, -1, mask=place < MOST)
    tl.debug_barrier()
    tl.store(ORDER + row, choice, mask=known)
    tl.store(TILES + 3 * tile, mine, mask=known & first)
    tl.store(TILES + 3 * tile + 1, row, mask=known & first)
    tl.store(TILES + 3 * tile + 2, count, mask=known & first)


@triton.jit(do_not_specialize=["P", "MOST"])
def group_kernel(
    IDS,
    ORDER,
    TILES,
    P,
    MOST,
    E: tl.constexpr,
    B: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """An expert's rows, in the order of the tokens, behind those of the experts before it; and its tiles.

    ``ORDER``: ``[P]``, the choice (token by ``k`` plus rank) of each row. ``TILES``: ``[MOST, 3]``: expert,
    first row and number of rows of each tile of up to ``B`` rows; expert -1 where there are no more.
    """
    own = tl.program_id(0)
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    choice = tl.arange(0, BLOCK)
    bins = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    for start in range(0, P, BLOCK):  # what there is not counts as an expert behind the last
        ids = tl.load(IDS + start + choice, mask=start + choice < P, other=E)
        counts += tl.histogram(ids, BINS)
    counts = tl.where(bins < E, counts, 0)
    tiles = (counts + B - 1) // B
    first = tl.sum(tl.where(bins < own, counts, 0), 0)
    count = tl.sum(tl.where(bins == own, counts, 0), 0)
    tile = tl.sum(tl.where(bins < own, tiles, 0), 0)
    row = first
    for start in range(0, P, BLOCK):
        mine = tl.load(IDS + start + choice, mask=start + choice < P, other=E) == own
        before = tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(ORDER + row + before, start + choice, mask=mine)
        row += tl.sum(mine.to(tl.int32), 0)
    for begin in range(0, count, B):
        tl.store(TILES + 3 * tile, own)
        tl.store(TILES + 3 * tile + 1, first + begin)
        tl.store(TILES + 3 * tile + 2, tl.minimum(count - begin, B))
        tile += 1
    if own == E - 1:
        for rest in range(tile, MOST, BLOCK):
            tl.store(TILES + 3 * (rest + choice), -1, mask=rest + choice < MOST)
