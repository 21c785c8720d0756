"""Gated activations by the C++ kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..native import DTYPES, library, takes

#: Elements from which several threads are worth their start.
_PARALLEL = 1 << 16


def can_gate(x: torch.Tensor) -> bool:
    """Whether ``x`` is contiguous."""
    return takes(x) and x.is_contiguous() and x.numel() > 0


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    return _gated(library().specdec_silu_and_mul, x)  # type: ignore[union-attr]  # `takes` asked for it


def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    return _gated(library().specdec_gelu_tanh_and_mul, x)  # type: ignore[union-attr]


def _gated(kernel: Callable[..., None], x: torch.Tensor) -> torch.Tensor:
    size = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], size), dtype=x.dtype)
    threads = torch.get_num_threads() if x.numel() > _PARALLEL else 1
    kernel(DTYPES[x.dtype], x.data_ptr(), out.data_ptr(), out.numel() // size, size, threads)
    return out
