"""Queries, keys and values as one product: heads are normed, rotated and stored where they are used."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from ..gpu.sums import tree_sum
from ..rotary.gpu import stored
from .mainloop import (
    accumulate_pairs,
    halves,
    paired,
    partial_squares,
    place,
    prefetch,
    reciprocal_rms,
)
from .quantized import multiply


@triton.jit(do_not_specialize=["M", "ahead"])
def qkv_kernel(
    W,
    X,
    WB,
    XB0,
    XB1,
    PARAMS,
    BIAS,
    DELTA,
    SQUARES,
    stride,
    COS,
    SIN,
    POSITIONS,
    SLOTS,
    QUERY_GAIN,
    KEY_GAIN,
    QUERY,
    KEYS,
    VALUES,
    M,
    ahead,
    eps,
    K: tl.constexpr,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    ROTATED: tl.constexpr,
    PAIRS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    B0: tl.constexpr,
    B1: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    EVICT: tl.constexpr,
    EARLY: tl.constexpr,
    KIND: tl.constexpr,
    SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    BESIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Queries, keys and values, rotated and stored.

    A tile holds both halves of its rotary pairs. A head has ``PAIRS`` of them in the tiles: ``D / 2``,
    or the next power of two where a tile must hold whole heads for their norm. ``ROTATED`` are rotated.
    """
    n, m = place(M, tl.cdiv(2 * (HQ + 2 * HKV) * PAIRS, ROWS), B0 + B1, GROUP)
    pair, half = paired(tl.arange(0, ROWS))
    head, _, low, high, there = _pair(n * (ROWS // 2) + pair, HQ + 2 * HKV, D, ROTATED, PAIRS)
    rows = tl.where(there, head * D + tl.where(half == 0, low, high), 0)
    m = m * (B0 + B1)
    if PDL:
        prefetch(W, rows, ahead, WIDTH, ROWS, SPLIT, BESIDE)
    if EARLY:  # positions and slots come from further back than the kernel right before
        t0 = _turns(COS, SIN, POSITIONS, SLOTS, n, m, M, HQ, HKV, D, ROTATED, PAIRS, ROWS, B0)
        if B1 > 0:
            t1 = _turns(COS, SIN, POSITIONS, SLOTS, n, m + B0, M, HQ, HKV, D, ROTATED, PAIRS, ROWS, B1)
    if PDL:
        cuda.gdc_wait()
    if EARLY:
        s0 = partial_squares(SQUARES, stride, m + tl.arange(0, B0), M, K, B0, COLUMNS)
        if B1 > 0:
            s1 = partial_squares(SQUARES, stride, m + B0 + tl.arange(0, B1), M, K, B1, COLUMNS)
    if WB is not None:  # a tile is a part of one head
        HALF: tl.constexpr = ROWS // 2
        start = n * HALF // PAIRS * D + n * HALF % PAIRS
        x0, y0, x1, y1 = accumulate_pairs(
            WB, XB0, XB1, start, start + PAIRS, m, K, HALF, B0, B1, BK, STAGES, PDL
        )  # fmt: skip
    else:
        a0, a1 = multiply(
            W, PARAMS, X, None, None, None, n, rows, m, M, (HQ + 2 * HKV) * D, K, KIND, SIZE, SPLIT, BESIDE,
            ROWS, B0, B1, BK, STAGES, EVICT, PDL,
        )  # fmt: skip
    if not EARLY:
        s0 = partial_squares(SQUARES, stride, m + tl.arange(0, B0), M, K, B0, COLUMNS)
        t0 = _turns(COS, SIN, POSITIONS, SLOTS, n, m, M, HQ, HKV, D, ROTATED, PAIRS, ROWS, B0)
    if WB is None:
        x0, y0 = halves(a0, ROWS, B0)
    _heads(
        x0, y0, s0, t0, BIAS, DELTA, QUERY_GAIN, KEY_GAIN, QUERY, KEYS, VALUES, n, m, M, eps,
        K, HQ, HKV, D, ROTATED, PAIRS, ROWS, B0,
    )  # fmt: skip
    if B1 > 0:
        if not EARLY:
            s1 = partial_squares(SQUARES, stride, m + B0 + tl.arange(0, B1), M, K, B1, COLUMNS)
            t1 = _turns(COS, SIN, POSITIONS, SLOTS, n, m + B0, M, HQ, HKV, D, ROTATED, PAIRS, ROWS, B1)
        if WB is None:
            x1, y1 = halves(a1, ROWS, B1)
        _heads(
            x1, y1, s1, t1, BIAS, DELTA, QUERY_GAIN, KEY_GAIN, QUERY, KEYS, VALUES, n, m + B0, M, eps,
            K, HQ, HKV, D, ROTATED, PAIRS, ROWS, B1,
        )  # fmt: skip


@triton.jit
def _turns(
    COS, SIN, POSITIONS, SLOTS, n, m, M,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, ROTATED: tl.constexpr, PAIRS: tl.constexpr,
    ROWS: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Slots of the tokens, cosines and sines of their pairs: ``[B]`` and ``[ROWS / 2, B]``."""
    m = m + tl.arange(0, B)
    slot = tl.load(SLOTS + m, mask=m < M, other=0)
    if ROTATED > 0:
        p = n * (ROWS // 2) + tl.arange(0, ROWS // 2)
        head, i, _, _, there = _pair(p, HQ + 2 * HKV, D, ROTATED, PAIRS)
        turned = ((i < ROTATED) & there & (head < HQ + HKV))[:, None] & (m < M)[None, :]
        position = tl.load(POSITIONS + m, mask=m < M, other=0)
        at = position[None, :] * ROTATED + i[:, None]
        return slot, tl.load(COS + at, mask=turned, other=1.0), tl.load(SIN + at, mask=turned, other=0.0)
    else:
        return slot, slot, slot


@triton.jit
def _pair(p, HEADS: tl.constexpr, D: tl.constexpr, ROTATED: tl.constexpr, PAIRS: tl.constexpr):
    """The ``p``-th pair: head, index in it, its two dimensions, and whether there is one.

    ``(i, i + ROTATED)`` are rotated; of the dimensions behind, the first half is paired with the second.
    """
    head = p // PAIRS
    i = p % PAIRS
    rotated = i < ROTATED
    low = tl.where(rotated, i, i + ROTATED)
    high = low + tl.where(rotated, ROTATED, D // 2 - ROTATED)
    return head, i, low, high, (head < HEADS) & (i < D // 2)


@triton.jit
def _heads(
    x,
    y,
    squares,
    turns,
    BIAS,
    DELTA,
    QUERY_GAIN,
    KEY_GAIN,
    QUERY,
    KEYS,
    VALUES,
    n,
    m,
    M,
    eps,
    K: tl.constexpr,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    ROTATED: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    B: tl.constexpr,
):
    HALF: tl.constexpr = ROWS // 2
    m = m + tl.arange(0, B)
    token = (m < M)[None, :]
    p = n * HALF + tl.arange(0, HALF)
    head, _, low, high, there = _pair(p, HQ + 2 * HKV, D, ROTATED, PAIRS)
    if DELTA is not None:
        at = m.to(tl.int64)[None, :] * ((HQ + 2 * HKV) * D) + (head * D)[:, None]
        inside = there[:, None] & token
        x += tl.load(DELTA + at + low[:, None], mask=inside, other=0.0).to(tl.float32)
        y += tl.load(DELTA + at + high[:, None], mask=inside, other=0.0).to(tl.float32)
    scale = reciprocal_rms(squares, eps, K, B)
    if BIAS is not None:
        x = tl.fma(x, scale, tl.load(BIAS + head * D + low, mask=there, other=0.0).to(tl.float32)[:, None])
        y = tl.fma(y, scale, tl.load(BIAS + head * D + high, mask=there, other=0.0).to(tl.float32)[:, None])
    else:
        x *= scale
        y *= scale
    if QUERY_GAIN is not None:
        x, y = _head_norm(x, y, QUERY_GAIN, KEY_GAIN, head, low, high, there, eps, HQ, HKV, D, PAIRS, HALF, B)
    slot, cos, sin = turns
    if ROTATED > 0:
        x, y = tl.fma(x, cos, -(y * sin)), tl.fma(y, cos, x * sin)
    first = n * HALF // PAIRS
    last = (n * HALF + HALF - 1) // PAIRS
    if first < HQ:
        at = m.to(tl.int64)[None, :] * (HQ * D) + (head * D)[:, None]
        inside = (there & (head < HQ))[:, None] & token
        tl.store(QUERY + at + low[:, None], x, mask=inside)
        tl.store(QUERY + at + high[:, None], y, mask=inside)
    if last >= HQ:
        if first < HQ + HKV:
            at = slot[None, :] * (HKV * D) + ((head - HQ) * D)[:, None]
            inside = (there & (head >= HQ) & (head < HQ + HKV))[:, None] & token
            tl.store(KEYS + at + low[:, None], stored(x, KEYS.dtype.element_ty), mask=inside)
            tl.store(KEYS + at + high[:, None], stored(y, KEYS.dtype.element_ty), mask=inside)
        if last >= HQ + HKV:
            at = slot[None, :] * (HKV * D) + ((head - HQ - HKV) * D)[:, None]
            inside = (there & (head >= HQ + HKV))[:, None] & token
            tl.store(VALUES + at + low[:, None], stored(x, VALUES.dtype.element_ty), mask=inside)
            tl.store(VALUES + at + high[:, None], stored(y, VALUES.dtype.element_ty), mask=inside)


@triton.jit
def _head_norm(
    x,
    y,
    QUERY_GAIN,
    KEY_GAIN,
    head,
    low,
    high,
    there,
    eps,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    HALF: tl.constexpr,
    B: tl.constexpr,
):
    """Queries and keys over the RMS of their head, by their gains; values as they are."""
    x = tl.where(there[:, None], x, 0.0)
    y = tl.where(there[:, None], y, 0.0)
    squares = tree_sum(tl.fma(x, x, y * y), HALF, B, PAIRS)
    scale = tl.rsqrt(tl.fma(squares, 1.0 / D, eps))
    scale = tl.reshape(tl.broadcast_to(scale[:, None, :], (HALF // PAIRS, PAIRS, B)), (HALF, B))
    query = there & (head < HQ)
    key = there & (head >= HQ) & (head < HQ + HKV)
    low_gain = tl.load(QUERY_GAIN + low, mask=query, other=0.0) + tl.load(KEY_GAIN + low, mask=key, other=0.0)
    high_gain = tl.load(QUERY_GAIN + high, mask=query, other=0.0) + tl.load(
        KEY_GAIN + high, mask=key, other=0.0
    )
    normed = (query | key)[:, None]
    return (
        tl.where(normed, x * scale * low_gain.to(tl.float32)[:, None], x),
        tl.where(normed, y * scale * high_gain.to(tl.float32)[:, None], y),
    )
