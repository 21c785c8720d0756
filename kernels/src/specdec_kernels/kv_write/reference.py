"""KV write in torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..rotary.reference import rotate

#: The greatest float8_e4m3fn.
FLOAT8_MAX = 448.0


def stored(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x`` as a cache of ``dtype`` holds it; in float8 what is too large becomes the greatest."""
    if dtype is torch.float8_e4m3fn:
        x = x.float().clamp(-FLOAT8_MAX, FLOAT8_MAX)
    return x.to(dtype)


def as_bits(cache: torch.Tensor) -> torch.Tensor:
    """``cache`` for operations that know no float8."""
    return cache.view(torch.uint8) if cache.dtype is torch.float8_e4m3fn else cache


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
    for new, cache in ((key, key_cache), (value, value_cache)):
        as_bits(cache).flatten(0, 1).index_copy_(0, slots, as_bits(stored(new, cache.dtype)))


def move_slots(
    caches: Sequence[tuple[torch.Tensor, torch.Tensor]], source: torch.Tensor, destination: torch.Tensor
) -> None:
    for cache in (part for pair in caches for part in pair):
        slots = as_bits(cache).flatten(0, 1)
        slots.index_copy_(0, destination, slots.index_select(0, source))
