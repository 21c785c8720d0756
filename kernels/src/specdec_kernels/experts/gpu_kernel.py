"""The experts' products as kernels: a tile is of one expert's weights and of up to ``B`` of its rows.

An expert's weights are read once for each of its tiles, which of few tokens is one. Tiles that are not
there end at once, so that launches have one size whatever the router says.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from ..activation.gpu import activate
from ..gpu.sums import sum_squares
from ..projection.mainloop import halves, paired, partial_squares, prefetch, reciprocal_rms
from .gpu_mainloop import accumulate


@triton.jit
def _tile(TILES, tile):
    """Expert, first row and number of rows, asked for together."""
    return tl.load(TILES + 3 * tile), tl.load(TILES + 3 * tile + 1), tl.load(TILES + 3 * tile + 2)


@triton.jit(do_not_specialize=["M", "ahead"])
def expert_gate_up_kernel(
    W,
    X,
    TILES,
    ORDER,
    WEIGHTS,
    SQUARES,
    stride,
    Y,
    M,
    ahead,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    COUNT: tl.constexpr,
    GELU: tl.constexpr,
    ROWS: tl.constexpr,
    B: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    EVICT: tl.constexpr,
    PDL: tl.constexpr,
):
    """``Y = act(gate) up`` by the expert's weight for the token, rows in the order of ``ORDER``."""
    PARTS: tl.constexpr = (2 * N + ROWS - 1) // ROWS
    tile = tl.program_id(0) // PARTS
    n = tl.program_id(0) % PARTS
    pair, half = paired(tl.arange(0, ROWS))
    rows = tl.minimum(n * (ROWS // 2) + pair, N - 1) + half * N
    j = tl.arange(0, B)
    if PDL:
        cuda.gdc_wait()
    expert, first, count = _tile(TILES, tile)
    if expert < 0:
        return
    W += expert.to(tl.int64) * (2 * N * K)
    if PDL:  # while the tokens are looked up
        prefetch(W, rows, ahead, K, ROWS, 1, "")
    there = j < count
    choice = tl.load(ORDER + first + j, mask=there, other=0)
    token = choice // COUNT
    w = W + rows.to(tl.int64)[:, None] * K
    x = X + token.to(tl.int64)[None, :] * K
    a = accumulate(w, x, there, K, ROWS, B, BK, STAGES, EVICT, PDL)
    scale = reciprocal_rms(partial_squares(SQUARES, stride, token, M, K, B), eps, K, B)
    weight = tl.load(WEIGHTS + choice, mask=there, other=0.0)
    gate, up = halves(a, ROWS, B)
    y = activate(gate * scale, GELU) * (up * scale) * weight[None, :]
    row = n * (ROWS // 2) + tl.arange(0, ROWS // 2)
    at = (first + j).to(tl.int64)[None, :] * N + row[:, None]
    tl.store(Y + at, y, mask=(row < N)[:, None] & there[None, :])


@triton.jit(do_not_specialize=["ahead"])
def expert_down_kernel(
    W,
    X,
    TILES,
    ORDER,
    Y,
    ahead,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    B: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    EVICT: tl.constexpr,
    PDL: tl.constexpr,
):
    """``Y = X W^T``, float32: rows of ``X`` in the order of ``ORDER``, those of ``Y`` by token and rank."""
    PARTS: tl.constexpr = (N + ROWS - 1) // ROWS
    tile = tl.program_id(0) // PARTS
    row = tl.program_id(0) % PARTS * ROWS + tl.arange(0, ROWS)
    rows = tl.minimum(row, N - 1)
    j = tl.arange(0, B)
    if PDL:
        cuda.gdc_wait()
    expert, first, count = _tile(TILES, tile)
    if expert < 0:
        return
    W += expert.to(tl.int64) * (N * K)
    if PDL:
        prefetch(W, rows, ahead, K, ROWS, 1, "")
    there = j < count
    choice = tl.load(ORDER + first + j, mask=there, other=0)
    w = W + rows.to(tl.int64)[:, None] * K
    x = X + (first + j).to(tl.int64)[None, :] * K
    a = accumulate(w, x, there, K, ROWS, B, BK, STAGES, EVICT, PDL)
    at = choice.to(tl.int64)[None, :] * N + row[:, None]
    tl.store(Y + at, a, mask=(row < N)[:, None] & there[None, :])


@triton.jit
def combine_kernel(
    Y,
    RESIDUAL,
    GAIN,
    NEW_RESIDUAL,
    SCALED,
    SQUARES,
    stride,
    H: tl.constexpr,
    COUNT: tl.constexpr,
    PDL: tl.constexpr,
):
    """1,024 columns of a token: the sum of its experts, likeliest first, added to the stream.

    Without a ``RESIDUAL`` the sum alone.
    """
    m = tl.program_id(0)
    part = tl.program_id(1) * 16 + tl.arange(0, 16)
    column = part[None, :] * 64 + tl.arange(0, 64)[:, None]
    there = column < H
    dtype = NEW_RESIDUAL.dtype.element_ty
    at = m.to(tl.int64) * H + column
    if RESIDUAL is not None:
        gain = tl.load(GAIN + column, mask=there, other=0.0).to(tl.float32)
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    total = tl.zeros((64, 16), tl.float32)
    for place in tl.static_range(COUNT):
        total += tl.load(Y + (m.to(tl.int64) * COUNT + place) * H + column, mask=there, other=0.0)
    if RESIDUAL is not None:
        residual = tl.load(RESIDUAL + at, mask=there, other=0.0).to(tl.float32)
        rounded = (residual + total.to(dtype).to(tl.float32)).to(dtype)
        tl.store(NEW_RESIDUAL + at, rounded, mask=there)
        value = rounded.to(tl.float32)
        tl.store(SCALED + at, value * gain, mask=there)
        squares = tl.reshape(sum_squares(value, 64, 16, 64), (16,))
        tl.store(SQUARES + part * stride + m, squares, mask=part * 64 < H)
    else:
        tl.store(NEW_RESIDUAL + at, total, mask=there)
