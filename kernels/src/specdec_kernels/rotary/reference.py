"""Rotary position embedding in torch."""

from __future__ import annotations

import torch


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads by their positions: pairs are ``(i, i + R/2)`` of the first ``R`` dimensions.

    Args:
        heads: ``[T, N, D]``.
        cos, sin: ``[T, R/2]`` float32, ``R <= D``; dimensions from ``R`` on are left as they are.

    Returns:
        ``[T, N, D]`` of the dtype of ``heads``; products are rounded once, from float32.
    """
    half = sin.shape[-1]
    dim = heads.shape[-1]
    pairs = heads.view(*heads.shape[:-1], 2, half) if dim == 2 * half else _pairs(heads, half)
    cos, sin = cos[:, None, None], sin[:, None]
    rotated = pairs * cos
    low, high = pairs.float().unbind(-2)
    rotated_low, rotated_high = rotated.unbind(-2)
    rotated_low.addcmul_(high, sin, value=-1)
    rotated_high.addcmul_(low, sin)
    rotated = rotated.view(*heads.shape[:-1], 2 * half).to(heads.dtype)
    return rotated if dim == 2 * half else torch.cat((rotated, heads[..., 2 * half :]), -1)


def apply_rotary(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`rotate` queries ``[T, Hq, D]`` and keys ``[T, Hkv, D]``."""
    return rotate(query, cos, sin), rotate(key, cos, sin)


def _pairs(heads: torch.Tensor, half: int) -> torch.Tensor:
    return heads[..., : 2 * half].unflatten(-1, (2, half))
