"""The noise in Triton: the words and uniform numbers of the reference to the bit, its logarithms nearly.

Bound by arithmetic: ten rounds of Philox for four tokens, two logarithms for each. The kernels are launched
without contraction of ``a * b + c``, so that a sum of logit and noise has the same bits in all of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from ..gpu import interpreted, launch

_BLOCK = 4096
_INTERPRETED = tl.constexpr(interpreted())  # which has no inline assembly
_LN2 = tl.constexpr(0.6931471805599453)
_LARGEST_UNIFORM = tl.constexpr(1.0 - 2.0**-24)


@triton.jit
def uniform_of(word):
    """The uniform number, never 0 and never 1, of a random uint32."""
    return tl.minimum((word.to(tl.float32) + 0.5) * 2.0**-32, _LARGEST_UNIFORM)


@triton.jit
def _negative_log(x):
    """``-log(x)`` by the special function unit: 2e-7 off near 1, elsewhere relative to it."""
    if _INTERPRETED:
        y = tl.log2(x)
    else:
        y = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return y * -_LN2


@triton.jit
def gumbel_of(word):
    """``-log(-log(1 - v))`` of a random uint32's uniform number ``v``.

    The inner logarithm keeps its relative precision down to the smallest ``v``, which are the largest
    values: a polynomial of relative error 2.5e-9 below 1/4 (Chebyshev interpolation of degree 6), and
    the logarithm of ``1 - v``, which is near enough to exact, above.
    """
    v = uniform_of(word)
    p = tl.fma(v, 0.3325749337673187, 0.0905156135559082)
    p = tl.fma(v, p, 0.21397438645362854)
    p = tl.fma(v, p, 0.24872595071792603)
    p = tl.fma(v, p, 0.33338767290115356)
    p = tl.fma(v, p, 0.49999913573265076)
    p = tl.fma(v, p, 1.0)
    e = tl.where(v < 0.25, v * p, _negative_log(1.0 - v))
    return _negative_log(e)


@triton.jit
def words_of(seed, index, position, stream, group):
    """``[Q, 4]`` uint32: the words of tokens ``4 * group ..``, for ``group`` ``[Q]`` int32 and one key."""
    zero = tl.zeros_like(group).to(tl.uint32)
    key = position.to(tl.uint32) + zero, index.to(tl.uint32) + zero, stream.to(tl.uint32) + zero
    a, b, c, d = tl.philox(seed, group.to(tl.uint32), key[0], key[1], key[2])
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (group.shape[0], 4))


@triton.jit
def words_at(seed, index, position, stream, token):
    """uint32 words of single tokens, int32 of any shape, for one key: as :func:`words_of` has them."""
    zero = tl.zeros_like(token).to(tl.uint32)
    key = position.to(tl.uint32) + zero, index.to(tl.uint32) + zero, stream.to(tl.uint32) + zero
    a, b, c, d = tl.philox(seed, (token >> 2).to(tl.uint32), key[0], key[1], key[2])
    lane = token & 3
    return tl.where(lane < 2, tl.where(lane == 0, a, b), tl.where(lane == 2, c, d))


@triton.jit
def _perturb_kernel(
    X,
    OUT,
    SEED,
    INDEX,
    POSITION,
    STREAM,
    V,
    x_stride,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(1)
    group = tl.program_id(0) * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    token = group[:, None] * 4 + tl.arange(0, 4)[None, :]
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    words = words_of(
        tl.load(SEED + row), tl.load(INDEX + row), tl.load(POSITION + row), tl.load(STREAM + row), group
    )
    noise = gumbel_of(words)
    if ADD:
        noise += tl.load(X + row.to(tl.int64) * x_stride + token, mask=token < V, other=0.0)
    tl.store(OUT + row.to(tl.int64) * V + token, noise, mask=token < V)


@triton.jit
def _gumbel_kernel(
    OUT,
    SEED,
    INDEX,
    POSITION,
    STREAM,
    IDS,
    K,
    ids_stride,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    token = tl.load(IDS + row.to(tl.int64) * ids_stride + column, mask=column < K, other=0)
    seed, index = tl.load(SEED + row), tl.load(INDEX + row)
    word = words_at(seed, index, tl.load(POSITION + row), tl.load(STREAM + row), token)
    tl.store(OUT + row.to(tl.int64) * K + column, gumbel_of(word), mask=column < K)


def gumbel(
    seed: torch.Tensor,
    index: torch.Tensor,
    position: torch.Tensor,
    token_ids: torch.Tensor | int,
    *,
    stream: torch.Tensor | int = 0,
) -> torch.Tensor:
    """As :func:`specdec_kernels.noise.gumbel`, on the device of ``seed``."""
    keys = _keys(seed, index, position, stream)
    rows = len(seed)
    if isinstance(token_ids, int):
        out = torch.empty(rows, token_ids, device=seed.device)
        _launch_perturb(out, out, keys, add=False)
        return out
    columns = token_ids.shape[-1]
    out = torch.empty(rows, columns, device=seed.device)
    if not out.numel():
        return out
    ids = token_ids.contiguous()
    block = min(_BLOCK // 4, max(32, triton.next_power_of_2(columns)))
    for start, end in _row_ranges(rows):
        part = ids if ids.dim() == 1 else ids[start:end]
        launch(
            _gumbel_kernel,
            (-(-columns // block), end - start),
            out[start:end],
            *(key[start:end] for key in keys),
            part,
            columns,
            0 if ids.dim() == 1 else columns,
            BLOCK=block,
            num_warps=4 if block > 128 else 1,
            enable_fp_fusion=False,
        )
    return out


def perturb(
    logits: torch.Tensor,
    seed: torch.Tensor,
    index: torch.Tensor,
    position: torch.Tensor,
    *,
    stream: torch.Tensor | int = 0,
) -> torch.Tensor:
    """As :func:`specdec_kernels.sampling.perturb`; ``logits`` ``[R, V]`` float32."""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    out = torch.empty(logits.shape, device=logits.device)
    _launch_perturb(logits, out, _keys(seed, index, position, stream), add=True)
    return out


def _launch_perturb(
    logits: torch.Tensor, out: torch.Tensor, keys: tuple[torch.Tensor, ...], *, add: bool
) -> None:
    rows, size = out.shape
    if not out.numel():
        return
    block = min(_BLOCK, max(64, triton.next_power_of_2(size)))
    for start, end in _row_ranges(rows):
        launch(
            _perturb_kernel,
            (-(-size // block), end - start),
            logits[start:end],
            out[start:end],
            *(key[start:end] for key in keys),
            size,
            logits.stride(0),
            ADD=add,
            BLOCK=block,
            num_warps=4 if block > 512 else 1,
            enable_fp_fusion=False,
        )


def _keys(
    seed: torch.Tensor, index: torch.Tensor, position: torch.Tensor, stream: torch.Tensor | int
) -> tuple[torch.Tensor, ...]:
    if not isinstance(stream, torch.Tensor):
        stream = torch.full_like(seed, stream)
    return tuple(key.expand_as(seed).contiguous() for key in (seed, index, position, stream))


def _row_ranges(rows: int) -> list[tuple[int, int]]:
    """Rows in parts that a grid's second axis can count."""
    return [(start, min(start + 65535, rows)) for start in range(0, rows, 65535)]
