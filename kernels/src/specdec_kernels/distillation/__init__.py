"""Teaching a drafter a target's law: the loss of each row of logits, and its gradient in their place."""

from __future__ import annotations

import torch

from ..gpu import takes
from . import reference


def distill_(
    logits: torch.Tensor, target_logits: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy of ``softmax(logits)`` against the target's law; ``logits`` become its gradient.

    The gradient is ``weight * (q - p)``, ``q`` the drafter's law and ``p`` the target's, in the dtype of
    ``logits``; sums and exponentials are in float32.

    Args:
        logits: ``[N, V]``, contiguous; overwritten.
        target_logits: ``[M, V]``, contiguous, finite.
        rows: ``[N]`` int64, which of them is the law wanted of each.
        weights: ``[N]`` float32.

    Returns:
        The weighted losses ``[N]`` float32, and ``[N]`` bool: whether the likeliest tokens agree (of several
        the first).
    """
    if takes(logits, target_logits):
        from . import gpu  # needs Triton

        return gpu.distill_(logits, target_logits, rows, weights)
    return reference.distill_(logits, target_logits, rows, weights)


__all__ = ["distill_"]
