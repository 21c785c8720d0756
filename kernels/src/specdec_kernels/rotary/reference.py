"""Rotary position embedding in torch."""

from __future__ import annotations

import torch


def apply_rotary(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys by their positions: pairs are ``(i, i + R/2)`` of the first ``R`` dimensions.

    Args:
        query: ``[T, Hq, D]``.
        key: ``[T, Hkv, D]``.
        cos, sin: ``[T, R/2]`` float32, ``R <= D``; dimensions from ``R`` on are left as they are.

    Returns:
        The rotated query and key, of their own dtypes; products are rounded once, from float32.
    """
    cos, sin = cos[:, None, None], sin[:, None]
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = sin.shape[-1]
    pairs = x[..., : 2 * half].unflatten(-1, (2, half))
    rotated = pairs * cos
    low, high = pairs.unbind(-2)
    rotated[..., 0, :].addcmul_(high.to(rotated.dtype), sin, value=-1)
    rotated[..., 1, :].addcmul_(low.to(rotated.dtype), sin)
    rotated = rotated.flatten(-2).to(x.dtype)
    return rotated if 2 * half == x.shape[-1] else torch.cat((rotated, x[..., 2 * half :]), -1)
