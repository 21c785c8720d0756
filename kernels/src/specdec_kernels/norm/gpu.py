"""RMS normalisation in Triton: a program a row, read once. The floor is its bytes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from ..gpu import launch, takes

#: Wider rows do not fit into the registers of a program.
_WIDEST = 32768


def can_norm(x: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether ``x`` is ``[..., D]`` with whole rows, and the others go with it."""
    return (
        takes(x, *others)
        and all(other.dtype is x.dtype for other in others)
        and x.dim() > 0
        and x.numel() > 0
        and x.stride(-1) == 1
        and x.shape[-1] <= _WIDEST
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(_norm_kernel, x, (weight.contiguous(), out), eps)
    return out


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _launch(_add_norm_kernel, x, (residual.contiguous(), weight.contiguous(), out, total), eps)
    return out, total


def _launch(
    kernel: triton.JITFunction, x: torch.Tensor, tensors: tuple[torch.Tensor, ...], eps: float
) -> None:
    if x.dim() > 3:
        x = x.contiguous().flatten(0, -3)
    x = x.reshape((1,) * (3 - x.dim()) + x.shape)  # a view: heads of a fused projection stay where they lie
    outer, inner, size = x.shape
    block = triton.next_power_of_2(size)
    outer_stride = x.stride(0) if outer > 1 else inner * size
    inner_stride = x.stride(1) if inner > 1 else size
    arguments = (x, *tensors, outer_stride, inner_stride, inner, eps)
    launch(kernel, (outer * inner,), *arguments, D=size, BLOCK=block, num_warps=min(max(block // 512, 1), 16))


@triton.jit
def _norm_kernel(
    X,
    WEIGHT,
    OUT,
    stride_outer,
    stride_inner,
    inner,
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    weight = tl.load(WEIGHT + i, mask=i < D, other=0.0).to(tl.float32)
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    at = row // inner * stride_outer + row % inner * stride_inner
    x = tl.load(X + at + i, mask=i < D, other=0.0).to(tl.float32)
    tl.store(OUT + row * D + i, _normed(x, weight, eps, D), mask=i < D)


@triton.jit
def _add_norm_kernel(
    X,
    RESIDUAL,
    WEIGHT,
    OUT,
    TOTAL,
    stride_outer,
    stride_inner,
    inner,
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    weight = tl.load(WEIGHT + i, mask=i < D, other=0.0).to(tl.float32)
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    at = row // inner * stride_outer + row % inner * stride_inner
    x = tl.load(X + at + i, mask=i < D, other=0.0).to(tl.float32)
    residual = tl.load(RESIDUAL + row * D + i, mask=i < D, other=0.0).to(tl.float32)
    total = (residual + x).to(TOTAL.dtype.element_ty)  # the norm is of what is stored
    tl.store(TOTAL + row * D + i, total, mask=i < D)
    tl.store(OUT + row * D + i, _normed(total.to(tl.float32), weight, eps, D), mask=i < D)


@triton.jit
def _normed(x, weight, eps, D: tl.constexpr):
    # The order of this sum follows the layout, and that follows the width and alignment of rows, which
    # are the same for all rows of a model.
    return x * tl.rsqrt(tl.fma(tl.sum(x * x, 0), 1.0 / D, eps)) * weight
