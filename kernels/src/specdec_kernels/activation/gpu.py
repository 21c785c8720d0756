"""Gated activations in Triton. The floor is their bytes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from ..gpu import launch, takes

_BLOCK = 1024


def can_gate(x: torch.Tensor) -> bool:
    """Whether ``x`` is contiguous."""
    return takes(x) and x.is_contiguous() and x.numel() > 0


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    return _gated(x, gelu=False)


def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    return _gated(x, gelu=True)


def _gated(x: torch.Tensor, *, gelu: bool) -> torch.Tensor:
    size = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], size), dtype=x.dtype, device=x.device)
    grid = (out.numel() // size, -(-size // _BLOCK))
    launch(_gate_kernel, grid, x, out, size, GELU=gelu, BLOCK=_BLOCK, num_warps=4)
    return out


@triton.jit
def _gate_kernel(X, OUT, size, GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    gate = tl.load(X + row * (2 * size) + i, mask=i < size, other=0.0).to(tl.float32)
    up = tl.load(X + row * (2 * size) + size + i, mask=i < size, other=0.0).to(tl.float32)
    tl.store(OUT + row * size + i, activate(gate, GELU) * up, mask=i < size)


@triton.jit
def activate(x, GELU: tl.constexpr):
    """SiLU, or GELU by its tanh approximation: both are ``x`` by a sigmoid."""
    if GELU:  # (1 + tanh(u)) / 2 = sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
        return x / (1.0 + tl.exp(-1.5957691216057308 * tl.fma(x * x * x, 0.044715, x)))
    else:
        return x / (1.0 + tl.exp(-x))
