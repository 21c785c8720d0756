"""The products as kernels: each is :mod:`mainloop` with an epilogue.

The floor of a product of few tokens is the bytes of its weights by the memory's bandwidth, of many
the FLOPs by the tensor cores'. Each waits for the kernel before it once its weights are on their way.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from ..activation.gpu import activate
from ..gpu.sums import sum_squares, tree_sum
from .mainloop import accumulate, halves, paired, place, prefetch, reciprocal_rms


@triton.jit(do_not_specialize=["M", "ahead"])
def product_kernel(
    W,
    X,
    BIAS,
    Y,
    M,
    ahead,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    B0: tl.constexpr,
    B1: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    EVICT: tl.constexpr,
    PDL: tl.constexpr,
):
    """``Y = X W^T + BIAS``."""
    n, m = place(M, tl.cdiv(N, ROWS), B0 + B1, GROUP)
    row = n * ROWS + tl.arange(0, ROWS)
    rows = tl.minimum(row, N - 1)
    if PDL:
        prefetch(W, rows, ahead, K, ROWS)
        cuda.gdc_wait()
    m = m * (B0 + B1)
    a0, a1 = accumulate(W, X, rows, m, M, K, ROWS, B0, B1, BK, STAGES, EVICT, PDL)
    _store_product(a0, BIAS, Y, row, m, M, N, B0)
    if B1 > 0:
        _store_product(a1, BIAS, Y, row, m + B0, M, N, B1)


@triton.jit
def _store_product(a, BIAS, Y, row, m, M, N: tl.constexpr, B: tl.constexpr):
    m = m + tl.arange(0, B)
    if BIAS is not None:
        a += tl.load(BIAS + row, mask=row < N, other=0.0).to(tl.float32)[:, None]
    tl.store(Y + m.to(tl.int64)[None, :] * N + row[:, None], a, mask=(row < N)[:, None] & (m < M)[None, :])


@triton.jit(do_not_specialize=["M", "ahead"])
def add_kernel(
    W,
    X,
    BIAS,
    RESIDUAL,
    GAIN,
    NEW_RESIDUAL,
    SCALED,
    SQUARES,
    stride,
    M,
    ahead,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    B0: tl.constexpr,
    B1: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    EVICT: tl.constexpr,
    PDL: tl.constexpr,
):
    """``NEW_RESIDUAL = RESIDUAL + X W^T + BIAS``, that by ``GAIN``, and the sums of its squares."""
    n, m = place(M, tl.cdiv(N, ROWS), B0 + B1, GROUP)
    row = n * ROWS + tl.arange(0, ROWS)
    rows = tl.minimum(row, N - 1)
    if PDL:
        prefetch(W, rows, ahead, K, ROWS)
        cuda.gdc_wait()
    m = m * (B0 + B1)
    a0, a1 = accumulate(W, X, rows, m, M, K, ROWS, B0, B1, BK, STAGES, EVICT, PDL)
    _add(a0, BIAS, RESIDUAL, GAIN, NEW_RESIDUAL, SCALED, SQUARES, stride, row, n, m, M, N, ROWS, B0)
    if B1 > 0:
        _add(a1, BIAS, RESIDUAL, GAIN, NEW_RESIDUAL, SCALED, SQUARES, stride, row, n, m + B0, M, N, ROWS, B1)


@triton.jit
def _add(
    a,
    BIAS,
    RESIDUAL,
    GAIN,
    NEW_RESIDUAL,
    SCALED,
    SQUARES,
    stride,
    row,
    n,
    m,
    M,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    B: tl.constexpr,
):
    dtype = NEW_RESIDUAL.dtype.element_ty
    m = m + tl.arange(0, B)
    at = m.to(tl.int64)[None, :] * N + row[:, None]
    inside = (row < N)[:, None] & (m < M)[None, :]
    if BIAS is not None:
        a += tl.load(BIAS + row, mask=row < N, other=0.0).to(tl.float32)[:, None]
    residual = tl.load(RESIDUAL + at, mask=inside, other=0.0).to(tl.float32) + a.to(dtype).to(tl.float32)
    rounded = residual.to(dtype)
    tl.store(NEW_RESIDUAL + at, rounded, mask=inside)
    residual = tl.where((row < N)[:, None], rounded.to(tl.float32), 0.0)
    gain = tl.load(GAIN + row, mask=row < N, other=0.0).to(tl.float32)
    tl.store(SCALED + at, residual * gain[:, None], mask=inside)
    part = n * (ROWS // 64) + tl.arange(0, ROWS // 64)
    squares = sum_squares(residual, ROWS, B, 64)
    stored = (part * 64 < N)[:, None] & (m < M)[None, :]
    tl.store(SQUARES + part[:, None] * stride + m[None, :], squares, mask=stored)


@triton.jit(do_not_specialize=["M", "ahead"])
def gate_up_kernel(
    W,
    X,
    BIAS,
    SQUARES,
    stride,
    Y,
    M,
    ahead,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    GELU: tl.constexpr,
    ROWS: tl.constexpr,
    B0: tl.constexpr,
    B1: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    EVICT: tl.constexpr,
    PDL: tl.constexpr,
):
    """``Y = act(gate) up``: a tile holds ``ROWS / 2`` rows of the gate and those ``N`` rows further."""
    n, m = place(M, tl.cdiv(2 * N, ROWS), B0 + B1, GROUP)
    pair, half = paired(tl.arange(0, ROWS))
    rows = tl.minimum(n * (ROWS // 2) + pair, N - 1) + half * N
    if PDL:
        prefetch(W, rows, ahead, K, ROWS)
        cuda.gdc_wait()
    m = m * (B0 + B1)
    a0, a1 = accumulate(W, X, rows, m, M, K, ROWS, B0, B1, BK, STAGES, EVICT, PDL)
    _gate(a0, BIAS, SQUARES, stride, Y, n, m, M, eps, N, K, GELU, ROWS, B0)
    if B1 > 0:
        _gate(a1, BIAS, SQUARES, stride, Y, n, m + B0, M, eps, N, K, GELU, ROWS, B1)


@triton.jit
def _gate(
    a,
    BIAS,
    SQUARES,
    stride,
    Y,
    n,
    m,
    M,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    GELU: tl.constexpr,
    ROWS: tl.constexpr,
    B: tl.constexpr,
):
    m = m + tl.arange(0, B)
    row = n * (ROWS // 2) + tl.arange(0, ROWS // 2)
    there = row < N
    scale = reciprocal_rms(SQUARES, stride, m, M, eps, K, B)
    gate, up = halves(a, ROWS, B)
    if BIAS is not None:
        gate = tl.fma(gate, scale, tl.load(BIAS + row, mask=there, other=0.0).to(tl.float32)[:, None])
        up = tl.fma(up, scale, tl.load(BIAS + N + row, mask=there, other=0.0).to(tl.float32)[:, None])
    else:
        gate *= scale
        up *= scale
    y = activate(gate, GELU) * up
    tl.store(Y + m.to(tl.int64)[None, :] * N + row[:, None], y, mask=there[:, None] & (m < M)[None, :])


@triton.jit(do_not_specialize=["M", "ahead"])
def qkv_kernel(
    W,
    X,
    BIAS,
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
    ROWS: tl.constexpr,
    B0: tl.constexpr,
    B1: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    EVICT: tl.constexpr,
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
    if PDL:
        prefetch(W, rows, ahead, K, ROWS)
        cuda.gdc_wait()
    m = m * (B0 + B1)
    a0, a1 = accumulate(W, X, rows, m, M, K, ROWS, B0, B1, BK, STAGES, EVICT, PDL)
    _heads(
        a0,
        BIAS,
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
        n,
        m,
        M,
        eps,
        K,
        HQ,
        HKV,
        D,
        ROTATED,
        PAIRS,
        ROWS,
        B0,
    )
    if B1 > 0:
        _heads(
            a1,
            BIAS,
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
            n,
            m + B0,
            M,
            eps,
            K,
            HQ,
            HKV,
            D,
            ROTATED,
            PAIRS,
            ROWS,
            B1,
        )


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
    a,
    BIAS,
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
    head, i, low, high, there = _pair(p, HQ + 2 * HKV, D, ROTATED, PAIRS)
    x, y = halves(a, ROWS, B)
    scale = reciprocal_rms(SQUARES, stride, m, M, eps, K, B)
    if BIAS is not None:
        x = tl.fma(x, scale, tl.load(BIAS + head * D + low, mask=there, other=0.0).to(tl.float32)[:, None])
        y = tl.fma(y, scale, tl.load(BIAS + head * D + high, mask=there, other=0.0).to(tl.float32)[:, None])
    else:
        x *= scale
        y *= scale
    if QUERY_GAIN is not None:
        x, y = _head_norm(x, y, QUERY_GAIN, KEY_GAIN, head, low, high, there, eps, HQ, HKV, D, PAIRS, HALF, B)
    if ROTATED > 0:
        turned = ((i < ROTATED) & there & (head < HQ + HKV))[:, None] & token
        position = tl.load(POSITIONS + m, mask=m < M, other=0)
        at = position[None, :] * ROTATED + i[:, None]
        cos = tl.load(COS + at, mask=turned, other=1.0)
        sin = tl.load(SIN + at, mask=turned, other=0.0)
        x, y = tl.fma(x, cos, -(y * sin)), tl.fma(y, cos, x * sin)
    first = n * HALF // PAIRS
    last = (n * HALF + HALF - 1) // PAIRS
    if first < HQ:
        at = m.to(tl.int64)[None, :] * (HQ * D) + (head * D)[:, None]
        inside = (there & (head < HQ))[:, None] & token
        tl.store(QUERY + at + low[:, None], x, mask=inside)
        tl.store(QUERY + at + high[:, None], y, mask=inside)
    if last >= HQ:
        slot = tl.load(SLOTS + m, mask=m < M, other=0)
        if first < HQ + HKV:
            at = slot[None, :] * (HKV * D) + ((head - HQ) * D)[:, None]
            inside = (there & (head >= HQ) & (head < HQ + HKV))[:, None] & token
            tl.store(KEYS + at + low[:, None], x, mask=inside)
            tl.store(KEYS + at + high[:, None], y, mask=inside)
        if last >= HQ + HKV:
            at = slot[None, :] * (HKV * D) + ((head - HQ - HKV) * D)[:, None]
            inside = (there & (head >= HQ + HKV))[:, None] & token
            tl.store(VALUES + at + low[:, None], x, mask=inside)
            tl.store(VALUES + at + high[:, None], y, mask=inside)


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


@triton.jit
def embed_kernel(IDS, TABLE, GAIN, RESIDUAL, SCALED, SQUARES, stride, H: tl.constexpr, PDL: tl.constexpr):
    """1,024 columns of a token: its embedding, that by ``GAIN``, and the sums of its squares."""
    m = tl.program_id(0)
    part = tl.program_id(1) * 16 + tl.arange(0, 16)
    column = part[None, :] * 64 + tl.arange(0, 64)[:, None]
    gain = tl.load(GAIN + column, mask=column < H, other=0.0).to(tl.float32)
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    x = tl.load(TABLE + tl.load(IDS + m).to(tl.int64) * H + column, mask=column < H, other=0.0)
    at = m.to(tl.int64) * H + column
    tl.store(RESIDUAL + at, x, mask=column < H)
    value = x.to(tl.float32)
    tl.store(SCALED + at, value * gain, mask=column < H)
    squares = tl.reshape(sum_squares(value, 64, 16, 64), (16,))
    tl.store(SQUARES + part * stride + m, squares, mask=part * 64 < H)


@triton.jit
def normalize_kernel(
    RESIDUAL, GAIN, SQUARES, stride, Y, eps, H: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """``BLOCK`` columns of a token over its RMS, by ``GAIN``."""
    m = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gain = tl.load(GAIN + column, mask=column < H, other=0.0).to(tl.float32)
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    at = m.to(tl.int64) * H + column
    x = tl.load(RESIDUAL + at, mask=column < H, other=0.0).to(tl.float32)
    scale = tl.reshape(reciprocal_rms(SQUARES, stride, m + tl.arange(0, 1), m + 1, eps, H, 1), (1,))
    tl.store(Y + at, x * scale * gain, mask=column < H)
