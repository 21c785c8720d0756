"""What stands between products, as kernels: embedding tokens, norms, joining and gathering their states."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from ..gpu.sums import sum_squares
from .mainloop import partial_squares, reciprocal_rms


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
def add_terms_kernel(
    TERMS,
    term_stride,
    BEFORE,
    GAIN,
    RESIDUAL,
    SCALED,
    SQUARES,
    stride,
    COUNT: tl.constexpr,
    H: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """1,024 columns of a token: ``BEFORE`` with ``COUNT`` terms added, that by ``GAIN``, sums of squares."""
    m = tl.program_id(0)
    part = tl.program_id(1) * 16 + tl.arange(0, 16)
    column = part[None, :] * 64 + tl.arange(0, 64)[:, None]
    gain = tl.load(GAIN + column, mask=column < H, other=0.0).to(tl.float32)
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    at = m.to(tl.int64) * H + column
    total = tl.load(TERMS + at, mask=column < H, other=0.0).to(tl.float32)
    for term in tl.static_range(1, COUNT):
        own = TERMS + tl.cast(term_stride, tl.int64) * term
        total += tl.load(own + at, mask=column < H, other=0.0).to(tl.float32)
    x = total.to(RESIDUAL.dtype.element_ty)  # rounded as the product it stands for
    if BEFORE is not None:
        before = tl.load(BEFORE + at, mask=column < H, other=0.0).to(tl.float32)
        x = (before + x.to(tl.float32)).to(RESIDUAL.dtype.element_ty)
    tl.store(RESIDUAL + at, x, mask=column < H)
    value = x.to(tl.float32)
    tl.store(SCALED + at, value * gain, mask=column < H)
    sums = part[None, :] * (64 // COLUMNS) + tl.arange(0, 64 // COLUMNS)[:, None]
    squares = sum_squares(value, 64, 16, COLUMNS)
    tl.store(SQUARES + sums * stride + m, squares, mask=sums * COLUMNS < H)


@triton.jit
def normalize_kernel(
    RESIDUAL, GAIN, SQUARES, stride, TOKENS, Y, eps,
    H: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``BLOCK`` columns of a token over its RMS, by ``GAIN``; of tokens ``TOKENS`` if that is given."""
    own = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gain = tl.load(GAIN + column, mask=column < H, other=0.0).to(tl.float32)
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    m = own
    if TOKENS is not None:
        m = tl.load(TOKENS + own).to(tl.int32)
    at = m.to(tl.int64) * H + column
    x = tl.load(RESIDUAL + at, mask=column < H, other=0.0).to(tl.float32)
    squares = partial_squares(SQUARES, stride, m + tl.arange(0, 1), m + 1, H, 1, COLUMNS)
    scale = tl.reshape(reciprocal_rms(squares, eps, H, 1), (1,))
    tl.store(Y + own.to(tl.int64) * H + column, x * scale * gain, mask=column < H)


@triton.jit
def join_kernel(
    IDS,
    TABLE,
    TABLE_GAIN,
    FEATURES,
    FEATURE_GAIN,
    ROWS,
    Y,
    eps,
    E: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One half of a token's input, its embedding or its features; over its RMS where there is a gain."""
    m = tl.program_id(0).to(tl.int64)
    Y += m * (E + H)
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    if tl.program_id(1) == 0:
        _half(TABLE + tl.load(IDS + m).to(tl.int64) * E, TABLE_GAIN, Y, eps, E, BLOCK)
    else:
        if ROWS is not None:
            m = tl.load(ROWS + m).to(tl.int64)
        _half(FEATURES + m * H, FEATURE_GAIN, Y + E, eps, H, BLOCK)


@triton.jit
def _half(X, GAIN, Y, eps, N: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    x = tl.load(X + column, mask=column < N, other=0.0).to(tl.float32)
    if GAIN is not None:
        gain = tl.load(GAIN + column, mask=column < N, other=0.0).to(tl.float32)
        # of one token in one tile of one size, so in one order
        x = x * tl.rsqrt(tl.fma(tl.sum(x * x, 0), 1.0 / N, eps)) * gain
    tl.store(Y + column, x, mask=column < N)


@triton.jit
def gather_kernel(A, B, C, D, ROWS, Y, stride, H: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """``BLOCK`` columns of row ``ROWS[t]`` of one of up to four tensors."""
    t = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    part = tl.program_id(2) + tl.zeros_like(column)
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    at = tl.load(ROWS + t).to(tl.int64) * H + column
    x = tl.load(A + at, mask=(part == 0) & (column < H), other=0.0)
    if B is not None:
        x = tl.where(part == 1, tl.load(B + at, mask=(part == 1) & (column < H), other=0.0), x)
    if C is not None:
        x = tl.where(part == 2, tl.load(C + at, mask=(part == 2) & (column < H), other=0.0), x)
    if D is not None:
        x = tl.where(part == 3, tl.load(D + at, mask=(part == 3) & (column < H), other=0.0), x)
    tl.store(Y + t * stride + part * H + column, x, mask=column < H)
