"""Writing new keys and values into a paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..gpu import takes
from ..rotary import rotate
from . import native, reference


def rotate_and_write_kv(
    heads: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """From a fused projection: queries and keys rotated, keys and values written, in one go.

    Args:
        heads: ``[T, Hq + 2 Hkv, D]``: queries, keys, values.
        cos, sin: ``[T, R/2]`` float32, contiguous, as for ``rotary.rotate``.
        key_cache, value_cache, slots: as for :func:`write_kv`.

    Returns:
        The rotated queries, ``[T, Hq, D]``.
    """
    if key_cache.dtype is torch.float8_e4m3fn and not heads.is_cuda:
        kv_heads = key_cache.shape[2]
        turned, value = heads.split((heads.shape[1] - kv_heads, kv_heads), 1)
        query, key = rotate(turned.contiguous(), cos, sin).split((turned.shape[1] - kv_heads, kv_heads), 1)
        write_kv(key, value, key_cache, value_cache, slots)
        return query.contiguous()
    if takes(heads, key_cache, value_cache):
        from . import gpu

        if gpu.can_rotate_and_write(heads, cos, sin, key_cache, value_cache):
            return gpu.rotate_and_write_kv(heads, cos, sin, key_cache, value_cache, slots)
    chosen = native if native.can_rotate_and_write(heads, cos, key_cache, value_cache) else reference
    return chosen.rotate_and_write_kv(heads, cos, sin, key_cache, value_cache, slots)


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Store each token's key and value in its physical slot, in place.

    Tokens may share a slot of the null block (suppressed writes); which of them stays is undefined.

    Args:
        key: ``[T, Hkv, Dk]``.
        value: ``[T, Hkv, Dv]``.
        key_cache: ``[num_blocks, block_size, Hkv, Dk]``, contiguous, of the key's dtype, or
            float8_e4m3fn: what is beyond 448 becomes that.
        value_cache: ``[num_blocks, block_size, Hkv, Dv]``.
        slots: ``[T]`` int64, ``block * block_size + offset``.
    """
    if takes(key, value, key_cache):
        from . import gpu

        if gpu.can_write(key, value, key_cache):
            gpu.write_kv(key, value, key_cache, value_cache, slots)
            return
    chosen = native if native.can_write(key, value, key_cache) else reference
    chosen.write_kv(key, value, key_cache, value_cache, slots)


def move_slots(
    caches: Sequence[tuple[torch.Tensor, torch.Tensor]], source: torch.Tensor, destination: torch.Tensor
) -> None:
    """Copy slots of all layers, in place, as if every one were read before any is written.

    What a tree's accepted path needs: its nodes' keys and values move from scratch to where tokens lie.

    Args:
        caches: keys and values of each layer, as for :func:`write_kv`.
        source: ``[N]`` int64 physical slots.
        destination: ``[N]`` int64 physical slots; where two are equal, which one stays is undefined, unless
            their sources are equal too.
    """
    if caches and takes(*caches[0]):
        from . import gpu

        if gpu.can_move(caches, source.shape[0]):
            gpu.move_slots(caches, source, destination)
            return
    reference.move_slots(caches, source, destination)


__all__ = ["move_slots", "rotate_and_write_kv", "write_kv"]
