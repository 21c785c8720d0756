"""RMS normalisation."""

from __future__ import annotations

import torch
from specdec_kernels.norm import fused_add_rms_norm, rms_norm

from .linear import copy_checked


class RMSNorm(torch.nn.Module):
    """RMS normalisation of the last dimension, with the residual addition before it where there is one."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=dtype, device=device), requires_grad=False)

    def load(self, kind: str, tensor: torch.Tensor, part: str | None = None) -> None:
        """Take a checkpoint's weight ``[size]``; ValueError if its shape is another one."""
        copy_checked(self.weight.data, tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., size] -> [..., size]``."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``(norm(residual + x), residual + x)``."""
        return fused_add_rms_norm(x, residual, self.weight, self.eps)
