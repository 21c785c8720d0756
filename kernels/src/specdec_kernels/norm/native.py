"""RMS normalisation by the C++ kernels. Same arguments and results as the torch reference."""

from __future__ import annotations

import torch

from ..native import DTYPES, library, takes


def can_norm(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether ``x`` is ``[..., D]`` that is contiguous but for its first dimension, with a weight like it."""
    return takes(x) and weight.dtype is x.dtype and 0 < x.dim() <= 3 and x.numel() > 0 and _rows_are_whole(x)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    groups = x.shape[1] if x.dim() == 3 else 1
    rows, stride = (x.shape[0], x.stride(0)) if x.dim() > 1 else (1, 0)
    library().specdec_rms_norm(  # type: ignore[union-attr]  # `takes` asked for it
        DTYPES[x.dtype],
        x.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        rows,
        stride,
        groups,
        x.shape[-1],
        eps,
    )
    return out


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out, total = torch.empty_like(x), torch.empty_like(x)
    size = x.shape[-1]
    library().specdec_add_rms_norm(  # type: ignore[union-attr]
        DTYPES[x.dtype],
        x.data_ptr(),
        residual.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        total.data_ptr(),
        x.numel() // size,
        size,
        eps,
    )
    return out, total


def can_add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether all are contiguous, of one dtype and, but for the weight, of one shape."""
    return (
        takes(x)
        and weight.dtype is residual.dtype is x.dtype
        and x.shape == residual.shape
        and x.numel() > 0
        and x.is_contiguous()
        and residual.is_contiguous()
    )


def _rows_are_whole(x: torch.Tensor) -> bool:
    return x.is_contiguous() or (x.dim() > 1 and x.stride(-1) == 1 and x[0].is_contiguous())
