"""Paged attention in torch: row by row on views of the cache where it can, on gathered blocks elsewhere."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .metadata import AttentionMetadata
from .plan import Tile, attention_plan


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    meta: AttentionMetadata,
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Softmax attention of every query token over the cache slots that ``meta`` lets it see.

    Args:
        query: ``[T, Hq, Dk]``; query heads ``h * Hq // Hkv ..`` share KV head ``h``.
        key_cache: ``[num_blocks, block_size, Hkv, Dk]``, contiguous, of the query's dtype.
        value_cache: ``[num_blocks, block_size, Hkv, Dv]``.
        meta: which slots each token sees; the plan derived from it is kept in ``meta.plans``.
        scale: factor of the scores.
        window: a token at position ``p`` sees positions above ``p - window`` only; None: all.

    Returns:
        ``[T, Hq, Dv]``; zero for tokens that see no slot.
    """
    num_heads, num_kv_heads = query.shape[1], key_cache.shape[2]
    plan = attention_plan(meta, window, num_heads // num_kv_heads, query.dtype)
    out = query.new_empty(query.shape[0], num_heads, value_cache.shape[3])
    for batch in plan.batches:
        keys, values = batch.source(key_cache, "key"), batch.source(value_cache, "value")
        for tile in batch.tiles:
            mask = plan.mask(tile) if tile.masked and tile.mask is None else tile.mask
            _attend(query, keys, values, out, tile, mask, scale)
    if plan.blind is not None:
        out.index_fill_(0, plan.blind, 0.0)
    return out


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    tile: Tile,
    mask: torch.Tensor | None,
    scale: float,
) -> None:
    num_kv_heads = keys.shape[1]
    # n tokens, K KV heads of G query heads, L keys: [K, n, G, D]
    heads = query[tile.begin : tile.end].unflatten(1, (num_kv_heads, -1)).transpose(0, 1)
    result = out[tile.begin : tile.end].unflatten(1, (num_kv_heads, -1)).transpose(0, 1)
    key = keys[tile.start : tile.stop].transpose(0, 1)  # [K, L, D]
    value = values[tile.start : tile.stop].transpose(0, 1)
    if tile.packed:
        # One matrix of n * G query rows a KV head.
        attended = F.scaled_dot_product_attention(
            heads.flatten(1, 2).unsqueeze(0),
            key.unsqueeze(0),
            value.unsqueeze(0),
            attn_mask=None if mask is None else mask[None, None],
            scale=scale,
        )
        result.copy_(attended[0].unflatten(1, heads.shape[1:3]))
    else:
        # The mask is shared by the heads: [K, G, n, D] against the KV head expanded over its group.
        group = heads.shape[2]
        attended = F.scaled_dot_product_attention(
            heads.transpose(1, 2),
            key.unsqueeze(1).expand(-1, group, -1, -1),
            value.unsqueeze(1).expand(-1, group, -1, -1),
            attn_mask=None if mask is None else mask[None, None],
            scale=scale,
        )
        result.copy_(attended.transpose(1, 2))
