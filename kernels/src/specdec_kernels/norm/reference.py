"""RMS normalisation in torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension; the mean and the root in float32.

    Args:
        x: ``[..., D]``.
        weight: ``[D]``, of the dtype of ``x``.
        eps: added to the mean square.
    """
    if x.is_cuda:
        return F.rms_norm(x, weight.shape, weight, eps)
    # On a CPU F.rms_norm runs twice as many operations, and at a few rows each costs its launch.
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * scale).to(x.dtype).mul_(weight)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``residual + x``, normalised and as it is: ``(normed, new residual)``, each ``[..., D]``."""
    residual = residual + x
    return rms_norm(residual, weight, eps), residual
