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
        prefetch(W, rows, ahead, K, ROWS)
        cuda.gdc_wait()
    m = tl.program_id(1) * B + tl.arange(0, B)
    squares = partial_squares(SQUARES, stride, m, M, K, B)
    w = W + rows.to(tl.int64)[:, None] * K
    x = X + m.to(tl.int64)[None, :] * K
    a = accumulate(w, x, m < M, K, ROWS, B, BK, STAGES, "", PDL)
    a *= reciprocal_rms(squares, eps, K, B)
    at = m.to(tl.int64)[None, :] * E + expert[:, None]
    tl.store(LOGITS + at, a, mask=(expert < E)[:, None] & (m < M)[None, :])


@triton.jit
def choose_kernel(
    LOGITS,
    IDS,
    WEIGHTS,
    E: tl.constexpr,
    COUNT: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The ``COUNT`` likeliest experts of a token, of equal ones the first, and their weights."""
    m = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    logits = tl.load(LOGITS + m * E + e, mask=e < E, other=float("-inf"))
    logits = tl.where(
        logits == logits, logits, float("-inf")
    )  # of NaN alone: experts that there are, NaN shares
    top = tl.max(logits, 0)
    # of one token in one tile of one size, so in one order
    all_shares = tl.sum(tl.exp(logits - top), 0)
    slot = tl.arange(0, SLOTS)
    ids = tl.zeros_like(slot)
    shares = tl.zeros((SLOTS,), tl.float32)
    total = 0.0
    for place in tl.static_range(COUNT):
        best = tl.argmax(logits, 0)
        share = tl.exp(tl.max(logits, 0) - top)
        logits = tl.where(e == best, float("-inf"), logits)
        ids = tl.where(slot == place, best, ids)
        shares = tl.where(slot == place, share, shares)
        total += share
    tl.store(IDS + m * COUNT + slot, ids, mask=slot < COUNT)
    if not NORMALIZE:
        total = all_shares
    tl.store(WEIGHTS + m * COUNT + slot, shares / total, mask=slot < COUNT)


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
