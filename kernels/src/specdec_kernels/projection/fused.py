"""The products as kernels: each is :mod:`mainloop` with an epilogue.

The floor of a product of few tokens is the bytes of its weights by the memory's bandwidth, of many
the FLOPs by the tensor cores'. Each waits for the kernel before it once its weights are on their way.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from ..activation.gpu import activate
from ..gpu.sums import sum_squares
from ..ranks.gpu import begin, end, receive_tile, send_tile
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
def product_kernel(
    W,
    X,
    WB,
    XB0,
    XB1,
    PARAMS,
    BIAS,
    DELTA,
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
    EARLY: tl.constexpr,
    KIND: tl.constexpr,
    SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    BESIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """``Y = X W^T + DELTA + BIAS``."""
    n, m = place(M, tl.cdiv(N, ROWS), B0 + B1, GROUP)
    row = n * ROWS + tl.arange(0, ROWS)
    rows = tl.minimum(row, N - 1)
    if PDL:
        prefetch(W, rows, ahead, WIDTH, ROWS, SPLIT, BESIDE)
        cuda.gdc_wait()
    m = m * (B0 + B1)
    a0, a1 = multiply(
        W, PARAMS, X, WB, XB0, XB1, n, rows, m, M, N, K, KIND, SIZE, SPLIT, BESIDE, ROWS, B0, B1, BK, STAGES,
        EVICT, PDL,
    )  # fmt: skip
    _store_product(a0, BIAS, DELTA, Y, row, m, M, N, B0)
    if B1 > 0:
        _store_product(a1, BIAS, DELTA, Y, row, m + B0, M, N, B1)


@triton.jit
def _store_product(a, BIAS, DELTA, Y, row, m, M, N: tl.constexpr, B: tl.constexpr):
    a = _with_additions(a, BIAS, DELTA, row, m, M, N, B)
    m = m + tl.arange(0, B)
    tl.store(Y + m.to(tl.int64)[None, :] * N + row[:, None], a, mask=(row < N)[:, None] & (m < M)[None, :])


@triton.jit(do_not_specialize=["M", "ahead"])
def add_kernel(
    W,
    X,
    WB,
    XB0,
    XB1,
    PARAMS,
    BIAS,
    DELTA,
    RESIDUAL,
    GAIN,
    NEW_RESIDUAL,
    SCALED,
    SQUARES,
    stride,
    MAIL,
    M,
    ahead,
    N: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,
    WORDS: tl.constexpr,
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
    """``NEW_RESIDUAL = RESIDUAL + X W^T + DELTA + BIAS``, that by ``GAIN``, and the sums of its squares.

    With ``MAIL``, a :class:`~specdec_kernels.ranks.Mail`'s state, what is added is summed over its ranks.
    """
    n, m = place(M, tl.cdiv(N, ROWS), B0 + B1, GROUP)
    row = n * ROWS + tl.arange(0, ROWS)
    rows = tl.minimum(row, N - 1)
    if PDL:
        prefetch(W, rows, ahead, WIDTH, ROWS, SPLIT, BESIDE)
    if EARLY:  # a gain is a weight: written by no kernel
        gain = tl.load(GAIN + row, mask=row < N, other=0.0)
    if PDL:
        cuda.gdc_wait()
    m = m * (B0 + B1)
    if MAIL is not None:
        begun = begin(MAIL, RANKS)
    if EARLY:
        r0 = _residual(RESIDUAL, row, m, M, N, B0)
        if B1 > 0:
            r1 = _residual(RESIDUAL, row, m + B0, M, N, B1)
    a0, a1 = multiply(
        W, PARAMS, X, WB, XB0, XB1, n, rows, m, M, N, K, KIND, SIZE, SPLIT, BESIDE, ROWS, B0, B1, BK, STAGES,
        EVICT, PDL,
    )  # fmt: skip
    if not EARLY:
        gain = tl.load(GAIN + row, mask=row < N, other=0.0)
        r0 = _residual(RESIDUAL, row, m, M, N, B0)
    if MAIL is not None:
        dtype = RESIDUAL.dtype.element_ty
        PAIRS: tl.constexpr = dtype == tl.bfloat16
        a0 = _with_additions(a0, BIAS, DELTA, row, m, M, N, B0).to(dtype).to(tl.float32)
        sent0 = send_tile(a0, row, m, M, N, begun, ROWS, B0, PAIRS, RANKS, WORDS)
        if B1 > 0:
            a1 = _with_additions(a1, BIAS, DELTA, row, m + B0, M, N, B1).to(dtype).to(tl.float32)
            sent1 = send_tile(a1, row, m + B0, M, N, begun, ROWS, B1, PAIRS, RANKS, WORDS)
        a0 = receive_tile(sent0, row, m, M, N, begun, MAIL, ROWS, B0, PAIRS, RANKS, WORDS)
        BIAS, DELTA = None, None  # are in the sum
    _add(a0, r0, gain, BIAS, DELTA, NEW_RESIDUAL, SCALED, SQUARES, stride, row, n, m, M, N, COLUMNS, ROWS, B0)
    if B1 > 0:
        if not EARLY:
            r1 = _residual(RESIDUAL, row, m + B0, M, N, B1)
        if MAIL is not None:
            a1 = receive_tile(sent1, row, m + B0, M, N, begun, MAIL, ROWS, B1, PAIRS, RANKS, WORDS)
        _add(
            a1, r1, gain, BIAS, DELTA, NEW_RESIDUAL, SCALED, SQUARES, stride, row, n, m + B0, M, N, COLUMNS,
            ROWS, B1,
        )  # fmt: skip
    if MAIL is not None:
        end(begun, MAIL)


@triton.jit
def _residual(RESIDUAL, row, m, M, N: tl.constexpr, B: tl.constexpr):
    m = m + tl.arange(0, B)
    inside = (row < N)[:, None] & (m < M)[None, :]
    return tl.load(RESIDUAL + m.to(tl.int64)[None, :] * N + row[:, None], mask=inside, other=0.0)


@triton.jit
def _with_additions(a, BIAS, DELTA, row, m, M, N: tl.constexpr, B: tl.constexpr):
    if DELTA is not None:
        m = m + tl.arange(0, B)
        inside = (row < N)[:, None] & (m < M)[None, :]
        a += tl.load(DELTA + m.to(tl.int64)[None, :] * N + row[:, None], mask=inside, other=0.0).to(
            tl.float32
        )
    if BIAS is not None:
        a += tl.load(BIAS + row, mask=row < N, other=0.0).to(tl.float32)[:, None]
    return a


@triton.jit
def _add(
    a,
    residual,
    gain,
    BIAS,
    DELTA,
    NEW_RESIDUAL,
    SCALED,
    SQUARES,
    stride,
    row,
    n,
    m,
    M,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    B: tl.constexpr,
):
    dtype = NEW_RESIDUAL.dtype.element_ty
    first, m = m, m + tl.arange(0, B)
    at = m.to(tl.int64)[None, :] * N + row[:, None]
    inside = (row < N)[:, None] & (m < M)[None, :]
    a = _with_additions(a, BIAS, DELTA, row, first, M, N, B)
    residual = residual.to(tl.float32) + a.to(dtype).to(tl.float32)
    rounded = residual.to(dtype)
    tl.store(NEW_RESIDUAL + at, rounded, mask=inside)
    residual = tl.where((row < N)[:, None], rounded.to(tl.float32), 0.0)
    tl.store(SCALED + at, residual * gain.to(tl.float32)[:, None], mask=inside)
    part = n * (ROWS // COLUMNS) + tl.arange(0, ROWS // COLUMNS)
    squares = sum_squares(residual, ROWS, B, COLUMNS)
    stored = (part * COLUMNS < N)[:, None] & (m < M)[None, :]
    tl.store(SQUARES + part[:, None] * stride + m[None, :], squares, mask=stored)


@triton.jit(do_not_specialize=["M", "ahead"])
def gate_up_kernel(
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
    Y,
    M,
    ahead,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    GELU: tl.constexpr,
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
    """``Y = act(gate) up``: a tile holds ``ROWS / 2`` rows of the gate and those ``N`` rows further."""
    n, m = place(M, tl.cdiv(2 * N, ROWS), B0 + B1, GROUP)
    pair, half = paired(tl.arange(0, ROWS))
    rows = tl.minimum(n * (ROWS // 2) + pair, N - 1) + half * N
    if PDL:
        prefetch(W, rows, ahead, WIDTH, ROWS, SPLIT, BESIDE)
        cuda.gdc_wait()
    m = m * (B0 + B1)
    if EARLY:
        s0 = partial_squares(SQUARES, stride, m + tl.arange(0, B0), M, K, B0, COLUMNS)
        if B1 > 0:
            s1 = partial_squares(SQUARES, stride, m + B0 + tl.arange(0, B1), M, K, B1, COLUMNS)
    if WB is not None:
        HALF: tl.constexpr = ROWS // 2
        x0, y0, x1, y1 = accumulate_pairs(
            WB, XB0, XB1, n * HALF, n * HALF + N, m, K, HALF, B0, B1, BK, STAGES, PDL
        )  # fmt: skip
    else:
        a0, a1 = multiply(
            W, PARAMS, X, None, None, None, n, rows, m, M, 2 * N, K, KIND, SIZE, SPLIT, BESIDE, ROWS, B0, B1,
            BK, STAGES, EVICT, PDL,
        )  # fmt: skip
    if not EARLY:
        s0 = partial_squares(SQUARES, stride, m + tl.arange(0, B0), M, K, B0, COLUMNS)
    if WB is None:
        x0, y0 = halves(a0, ROWS, B0)
    _gate(x0, y0, s0, BIAS, DELTA, Y, n, m, M, eps, N, K, GELU, ROWS, B0)
    if B1 > 0:
        if not EARLY:
            s1 = partial_squares(SQUARES, stride, m + B0 + tl.arange(0, B1), M, K, B1, COLUMNS)
        if WB is None:
            x1, y1 = halves(a1, ROWS, B1)
        _gate(x1, y1, s1, BIAS, DELTA, Y, n, m + B0, M, eps, N, K, GELU, ROWS, B1)


@triton.jit
def _gate(
    gate,
    up,
    squares,
    BIAS,
    DELTA,
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
    if DELTA is not None:
        at = m.to(tl.int64)[None, :] * (2 * N) + row[:, None]
        inside = there[:, None] & (m < M)[None, :]
        gate += tl.load(DELTA + at, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(DELTA + at + N, mask=inside, other=0.0).to(tl.float32)
    scale = reciprocal_rms(squares, eps, K, B)
    if BIAS is not None:
        gate = tl.fma(gate, scale, tl.load(BIAS + row, mask=there, other=0.0).to(tl.float32)[:, None])
        up = tl.fma(up, scale, tl.load(BIAS + N + row, mask=there, other=0.0).to(tl.float32)[:, None])
    else:
        gate *= scale
        up *= scale
    y = activate(gate, GELU) * up
    tl.store(Y + m.to(tl.int64)[None, :] * N + row[:, None], y, mask=there[:, None] & (m < M)[None, :])
