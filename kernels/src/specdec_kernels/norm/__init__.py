"""RMS normalisation (Zhang and Sennrich, arXiv 1910.07467)."""

from __future__ import annotations

import torch

from . import native, reference


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, computed in float32.

    Args:
        x: ``[..., D]``.
        weight: ``[D]``, of the dtype of ``x``.
        eps: added to the mean square.
    """
    chosen = native if native.can_norm(x, weight) else reference
    return chosen.rms_norm(x, weight, eps)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``residual + x``, normalised and as it is: ``(normed, new residual)``, each ``[..., D]``."""
    chosen = native if native.can_add_norm(x, residual, weight) else reference
    return chosen.fused_add_rms_norm(x, residual, weight, eps)


__all__ = ["fused_add_rms_norm", "rms_norm"]
