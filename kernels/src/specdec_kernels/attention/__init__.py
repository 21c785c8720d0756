"""Attention of query tokens over a paged KV cache."""

from __future__ import annotations

import torch

from ..gpu import takes
from . import native, reference
from .metadata import AttentionMetadata
from .native import HEAD_DIM_STEP


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    meta: AttentionMetadata,
    *,
    scale: float,
    window: int | None = None,
    settled: bool = False,
) -> torch.Tensor:
    """Softmax attention of every query token over the cache slots that ``meta`` lets it see.

    In the C++ and the Triton kernel a token's bits are its own, whatever is computed beside it; in the
    C++ kernel a tree's node has those of its path as well.

    Args:
        query: ``[T, Hq, Dk]``; query heads ``h * Hq // Hkv ..`` share KV head ``h``.
        key_cache: ``[num_blocks, block_size, Hkv, Dk]``, contiguous, of the query's dtype or float8_e4m3fn.
        value_cache: ``[num_blocks, block_size, Hkv, Dv]``.
        meta: which slots each token sees; what is derived from it is kept in ``meta.plans``.
        scale: factor of the scores.
        window: a token at position ``p`` sees positions above ``p - window`` only; None: all.
        settled: the kernel right before writes nothing of ``meta``, which may then be read while that runs;
            from the second call with one ``meta`` on this is taken for granted.

    Returns:
        ``[T, Hq, Dv]``; zero for tokens that see no slot.
    """
    if takes(query, key_cache, value_cache):
        from . import gpu

        if gpu.can_attend(query, key_cache, value_cache, scale):
            return gpu.paged_attention(
                query, key_cache, value_cache, meta, scale=scale, window=window, settled=settled
            )
    chosen = native if native.can_attend(query, key_cache, value_cache) else reference
    return chosen.paged_attention(query, key_cache, value_cache, meta, scale=scale, window=window)


__all__ = ["HEAD_DIM_STEP", "AttentionMetadata", "paged_attention"]
