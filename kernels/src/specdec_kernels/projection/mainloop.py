"""What the fused products share: the loop over the inputs, and sums in an order that is written down.

A tile is ``[outputs, tokens]``: the weights are the 64-row side of a tensor core instruction and the
tokens its narrow side, so that one token is padded to 16 only. Whatever the tile, an output is summed
over the inputs in their order; where the compiler could choose an order (sums over a tile's layout) or
fuse a product into a sum, the code says which. So a token's bits are the same in every tile.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from ..gpu.sums import tree_sum

_PREFETCH: tl.constexpr = tl.constexpr(
    "{.reg .pred p; setp.gt.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;}"
)


@triton.jit
def place(M, TILES: tl.constexpr, TOKENS: tl.constexpr, GROUP: tl.constexpr):
    """This program's tile: which outputs, which tokens.

    Tokens go first in groups of ``GROUP`` tiles: what runs at one time shares weights and activations in L2.
    """
    program = tl.program_id(0)
    in_group: tl.constexpr = GROUP * TILES
    first = program // in_group * GROUP
    size = min(tl.cdiv(M, TOKENS) - first, GROUP)
    rest = program % in_group
    return rest // size, first + rest % size


@triton.jit
def prefetch(
    W, rows, amount, K: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr, BESIDE: tl.constexpr
):  # fmt: skip
    """Bring the first ``amount`` bytes of each weight row into L2; of rows in parts that are read at a time
    (as of :func:`~.quantized.accumulate_words`), the first bytes of each.

    Weights are written by no kernel, so this may run while the kernel before still does.
    """
    HEADS: tl.constexpr = SPLIT if BESIDE != "" else 1
    THREADS: tl.constexpr = 128 // ROWS if ROWS < 128 else 1  # for a row, of four warps
    EACH: tl.constexpr = THREADS // HEADS if THREADS > HEADS else 1
    size = amount // (HEADS * EACH)
    part = tl.arange(0, HEADS * EACH)[None, :]
    first = (W + rows.to(tl.int64)[:, None] * K + part // EACH * (K // HEADS)).to(tl.pointer_type(tl.int8))
    sizes = tl.zeros((ROWS, HEADS * EACH), tl.int32) + size
    tl.inline_asm_elementwise(
        _PREFETCH, "=r,l,r", [first + part % EACH * size, sizes], tl.int32, is_pure=False, pack=1
    )


@triton.constexpr_function
def last_loads(k: int, bk: int, stages: int) -> int:
    """Where the loop is when its last loads are on their way; at its first step where all of them are."""
    return max(0, -(-k // bk) - stages) * bk


@triton.jit
def accumulate(
    W,
    X,
    WB,
    XB0,
    XB1,
    n,
    rows,
    m,
    M,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    B0: tl.constexpr,
    B1: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    EVICT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Weight rows ``rows`` times tokens from ``m`` on: ``[ROWS, B0]``, and ``[ROWS, B1]`` of those behind.

    Two accumulators, since a tile's side is a power of two: 96 tokens are 64 and 32. The next kernel
    is let in when the last weights are on their way. ``WB``, ``XB0``, ``XB1``: descriptors to load by, of
    the weights, whose tile ``n`` this is, and of both parts of the tokens; None: by addresses.
    """
    k0 = tl.arange(0, BK)
    if WB is None:
        w = W + rows.to(tl.int64)[:, None] * K + k0[None, :]
        m0 = m + tl.arange(0, B0)
        x0 = X + m0.to(tl.int64)[None, :] * K + k0[:, None]
    a0 = tl.zeros((ROWS, B0), tl.float32)
    if B1 > 0:
        if WB is None:
            m1 = m + B0 + tl.arange(0, B1)
            x1 = X + m1.to(tl.int64)[None, :] * K + k0[:, None]
        a1 = tl.zeros((ROWS, B1), tl.float32)
    LAST: tl.constexpr = last_loads(K, BK, STAGES)
    for k in tl.range(0, K, BK, num_stages=STAGES):
        if WB is not None:  # what lies outside of a tensor comes as zero
            weight = WB.load([n * ROWS, k])
            a0 = tl.dot(weight, tl.trans(XB0.load([m, k])), a0, input_precision="ieee")
            if B1 > 0:
                a1 = tl.dot(weight, tl.trans(XB1.load([m + B0, k])), a1, input_precision="ieee")
        elif K % BK == 0:
            weight = tl.load(w + k, eviction_policy=EVICT)
            a0 = tl.dot(
                weight, tl.load(x0 + k, mask=(m0 < M)[None, :], other=0.0), a0, input_precision="ieee"
            )
            if B1 > 0:
                y = tl.load(x1 + k, mask=(m1 < M)[None, :], other=0.0)
                a1 = tl.dot(weight, y, a1, input_precision="ieee")
        else:
            inside = k + k0 < K
            weight = tl.load(w + k, mask=inside[None, :], other=0.0, eviction_policy=EVICT)
            x = tl.load(x0 + k, mask=(m0 < M)[None, :] & inside[:, None], other=0.0)
            a0 = tl.dot(weight, x, a0, input_precision="ieee")
            if B1 > 0:
                y = tl.load(x1 + k, mask=(m1 < M)[None, :] & inside[:, None], other=0.0)
                a1 = tl.dot(weight, y, a1, input_precision="ieee")
        if PDL:  # noqa: SIM102  one is known when it is compiled
            if k == LAST:
                cuda.gdc_launch_dependents()
    if B1 > 0:
        return a0, a1
    else:
        return a0, a0


@triton.jit
def accumulate_pairs(
    WB,
    XB0,
    XB1,
    low,
    high,
    m,
    K: tl.constexpr,
    HALF: tl.constexpr,
    B0: tl.constexpr,
    B1: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """The same by descriptors, of ``HALF`` weight rows from ``low`` and from ``high`` on: as :func:`halves`.

    Two products, since a box is of rows that follow each other.
    """
    x0 = tl.zeros((HALF, B0), tl.float32)
    y0 = tl.zeros((HALF, B0), tl.float32)
    if B1 > 0:
        x1 = tl.zeros((HALF, B1), tl.float32)
        y1 = tl.zeros((HALF, B1), tl.float32)
    LAST: tl.constexpr = last_loads(K, BK, STAGES)
    for k in tl.range(0, K, BK, num_stages=STAGES):
        one = WB.load([low, k])
        other = WB.load([high, k])
        tokens = tl.trans(XB0.load([m, k]))
        x0 = tl.dot(one, tokens, x0, input_precision="ieee")
        y0 = tl.dot(other, tokens, y0, input_precision="ieee")
        if B1 > 0:
            behind = tl.trans(XB1.load([m + B0, k]))
            x1 = tl.dot(one, behind, x1, input_precision="ieee")
            y1 = tl.dot(other, behind, y1, input_precision="ieee")
        if PDL:  # noqa: SIM102  one is known when it is compiled
            if k == LAST:
                cuda.gdc_launch_dependents()
    if B1 > 0:
        return x0, y0, x1, y1
    else:
        return x0, y0, x0, y0


@triton.jit
def paired(i):
    """Row ``i`` of a tile of pairs: its pair, and which half. The halves are 8 rows apart.

    The tensor core's result has rows 8 apart in one thread, so that :func:`halves` moves little.
    """
    return i // 16 * 8 + i % 8, i // 8 % 2


@triton.jit
def halves(a, ROWS: tl.constexpr, B: tl.constexpr):
    """A tile of pairs ``[ROWS, B]`` -> its two halves, ``[ROWS / 2, B]``."""
    x, y = tl.split(tl.permute(tl.reshape(a, (ROWS // 16, 2, 8, B)), (0, 2, 3, 1)))
    return tl.reshape(x, (ROWS // 2, B)), tl.reshape(y, (ROWS // 2, B))


@triton.jit
def partial_squares(
    SQUARES, stride, m, M, H: tl.constexpr, B: tl.constexpr, COLUMNS: tl.constexpr = 64
):  # fmt: skip
    """What :func:`reciprocal_rms` adds up: ``[8, B]`` of each eight rows of the partial sums.

    Without ``SQUARES`` there is nothing to divide by: ``[1, B]``, the factor itself.
    """
    if SQUARES is None:
        return (tl.full((1, B), 1.0, tl.float32),)
    else:
        return _partial_squares(SQUARES, stride, m, M, H, B, COLUMNS)


@triton.jit
def _partial_squares(SQUARES, stride, m, M, H: tl.constexpr, B: tl.constexpr, COLUMNS: tl.constexpr):
    PARTS: tl.constexpr = (H + COLUMNS - 1) // COLUMNS
    j = tl.arange(0, 8)[:, None]
    there = (j < PARTS) & (m < M)[None, :]
    parts = (tl.load(SQUARES + j * stride + m[None, :], mask=there, other=0.0),)
    for t in tl.static_range(8, PARTS, 8):
        there = (t + j < PARTS) & (m < M)[None, :]
        eight = tl.load(SQUARES + (t + j) * stride + m[None, :], mask=there, other=0.0)
        parts = parts + (eight,)  # type: ignore[assignment]  # noqa: RUF005  Triton does not unpack
    return parts


@triton.jit
def reciprocal_rms(parts, eps, H: tl.constexpr, B: tl.constexpr):
    """``1 / rms`` of tokens from the partial sums of their squares: ``[1, B]``."""
    if parts[0].shape[0] == 1:
        return parts[0]
    else:
        total = tl.zeros((8, B), tl.float32)
        for t in tl.static_range(len(parts)):
            total += parts[t]
        return tl.rsqrt(tl.fma(tree_sum(total, 8, B, 8), 1.0 / H, eps))
