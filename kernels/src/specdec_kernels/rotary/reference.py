"""Rotary position embedding in torch."""

from __future__ import annotations

import torch


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
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


def _pairs(heads: torch.Tensor, half: int) -> torch.Tensor:
    return heads[..., : 2 * half].unflatten(-1, (2, half))
