"""KV write in torch."""

from __future__ import annotations

from collections.abc import Sequence

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


def move_slots(
    caches: Sequence[tuple[torch.Tensor, torch.Tensor]], source: torch.Tensor, destination: torch.Tensor
) -> None:
    for cache in (part for pair in caches for part in pair):
        slots = cache.flatten(0, 1)
        slots.index_copy_(0, destination, slots.index_select(0, source))
