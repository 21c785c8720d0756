"""Rotary position embedding (Su et al., arXiv 2104.09864)."""

from __future__ import annotations

import torch

from ..gpu import takes
from . import native, reference


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads by their positions: pairs are ``(i, i + R/2)`` of the first ``R`` dimensions.

    Args:
        heads: ``[T, N, D]``.
        cos, sin: ``[T, R/2]`` float32, ``R <= D``; dimensions from ``R`` on are left as they are.

    Returns:
        ``[T, N, D]`` of the dtype of ``heads``; products are rounded once, from float32.
    """
    if takes(heads):
        from . import gpu

        if gpu.can_rotate(heads, cos, sin):
            return gpu.rotate(heads, cos, sin)
    return (native if native.can_rotate(heads, cos, sin) else reference).rotate(heads, cos, sin)


def apply_rotary(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`rotate` queries ``[T, Hq, D]`` and keys ``[T, Hkv, D]``."""
    return rotate(query, cos, sin), rotate(key, cos, sin)


__all__ = ["apply_rotary", "rotate"]
