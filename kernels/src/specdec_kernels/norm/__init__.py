"""RMS normalisation (Zhang and Sennrich, arXiv 1910.07467)."""

from __future__ import annotations

from types import ModuleType

import torch

from ..gpu import takes
from . import native, reference


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, computed in float32.

    Args:
        x: ``[..., D]``.
        weight: ``[D]``, of the dtype of ``x``.
        eps: added to the mean square.
    """
    chosen = native if native.can_norm(x, weight) else _elsewhere(x, weight)
    return chosen.rms_norm(x, weight, eps)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``residual + x``, normalised and as it is: ``(normed, new residual)``, each ``[..., D]``."""
    chosen = native if native.can_add_norm(x, residual, weight) else _elsewhere(x, residual, weight)
    return chosen.fused_add_rms_norm(x, residual, weight, eps)


def _elsewhere(*tensors: torch.Tensor) -> ModuleType:
    """The kernels in Triton where they can, else the torch reference."""
    if takes(*tensors):
        from . import gpu  # needs Triton

        if gpu.can_norm(*tensors):
            return gpu
    return reference


__all__ = ["fused_add_rms_norm", "rms_norm"]
