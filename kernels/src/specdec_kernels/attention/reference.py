"""Paged attention in torch: row by row on views of the cache where it can, on gathered blocks elsewhere."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .metadata import AttentionMetadata
from .plan import attention_plan


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    meta: AttentionMetadata,
    *,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    if key_cache.dtype is not query.dtype:
        key_cache, value_cache = key_cache.to(query.dtype), value_cache.to(query.dtype)
    num_kv_heads = key_cache.shape[2]
    group = query.shape[1] // num_kv_heads
    plan = attention_plan(meta, window, group, query.dtype)
    out = query.new_empty(query.shape[0], query.shape[1], value_cache.shape[3])
    # T tokens, K KV heads of G query heads, S slots: [1, K, T, G, D] and [1, K, S, D].
    heads = query.view(1, -1, num_kv_heads, group, query.shape[2]).transpose(1, 2)
    result = out.view(1, -1, num_kv_heads, group, out.shape[2]).transpose(1, 2)
    for batch in plan.batches:
        keys = batch.source(key_cache, "key").transpose(0, 1).unsqueeze(0)
        values = batch.source(value_cache, "value").transpose(0, 1).unsqueeze(0)
        for tile in batch.tiles:
            count, length = tile.end - tile.begin, tile.stop - tile.start
            _attend(
                heads.narrow(2, tile.begin, count),
                keys.narrow(2, tile.start, length),
                values.narrow(2, tile.start, length),
                result.narrow(2, tile.begin, count),
                plan.mask(tile) if tile.masked and tile.mask is None else tile.mask,
                scale,
                packed=tile.packed,
            )
    if plan.blind is not None:
        out.index_fill_(0, plan.blind, 0.0)
    return out


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    result: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    *,
    packed: bool,
) -> None:
    """One tile: query and result ``[1, K, n, G, D]``, key and value ``[1, K, L, D]``."""
    if packed:
        # One matrix of n * G query rows a KV head; the mask is [n * G, L].
        attended = F.scaled_dot_product_attention(
            query.flatten(2, 3), key, value, attn_mask=mask, scale=scale
        )
        result.copy_(attended.view_as(result))
    else:
        # The mask [n, L] is shared by all heads: the KV heads are expanded over their groups.
        group = query.shape[3]
        attended = F.scaled_dot_product_attention(
            query[0].transpose(1, 2),
            key[0].unsqueeze(1).expand(-1, group, -1, -1),
            value[0].unsqueeze(1).expand(-1, group, -1, -1),
            attn_mask=mask,
            scale=scale,
        )
        result[0].copy_(attended.transpose(1, 2))
