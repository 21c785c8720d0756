"""Rotary position embedding by the C++ kernels."""

from __future__ import annotations

import torch

from ..native import DTYPES, library, takes


def can_rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether the heads of a token lie side by side, and cosine and sine are float32."""
    return (
        takes(heads)
        and heads.stride(2) == 1
        and heads.stride(1) == heads.shape[2]
        and cos.dtype is sin.dtype is torch.float32
        and cos.is_contiguous()
        and sin.is_contiguous()
    )


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    tokens, count, dim = heads.shape
    out = torch.empty((tokens, count, dim), dtype=heads.dtype)
    library().specdec_rotate(  # type: ignore[union-attr]  # `takes` asked for it
        DTYPES[heads.dtype],
        heads.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        out.data_ptr(),
        tokens,
        heads.stride(0),
        count,
        dim,
        sin.shape[-1],
    )
    return out
