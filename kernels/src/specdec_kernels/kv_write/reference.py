"""KV write in torch."""

from __future__ import annotations

import torch

from ..rotary.reference import rotate


def rotate_and_write_kv(
    heads: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    kv_heads = key_cache.shape[2]
    turned, value = heads.split((heads.shape[1] - kv_heads, kv_heads), 1)
    query, key = rotate(turned, cos, sin).split((turned.shape[1] - kv_heads, kv_heads), 1)
    write_kv(key, value, key_cache, value_cache, slots)
    return query


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    key_cache.flatten(0, 1).index_copy_(0, slots, key)
    value_cache.flatten(0, 1).index_copy_(0, slots, value)
