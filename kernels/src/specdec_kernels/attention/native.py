"""Paged attention by the C++ kernels: in place, and a token's bits are its own."""

from __future__ import annotations

import torch

from ..native import DTYPES, library, takes
from .metadata import AttentionMetadata

#: Head sizes are multiples of it.
HEAD_DIM_STEP = 16
_MOST_DIM, _MOST_GROUP = 256, 64
#: Products of a step from which several threads are worth their start.
_PARALLEL = 1 << 17


def can_attend(query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> bool:
    """Whether head sizes are multiples of 16 up to 256, and the cache of their dtype or float8_e4m3fn."""
    dims = (key_cache.shape[3], value_cache.shape[3])
    return (
        takes(query)
        and key_cache.dtype is value_cache.dtype
        and key_cache.dtype in (query.dtype, torch.float8_e4m3fn)
        and all(dim % HEAD_DIM_STEP == 0 and dim <= _MOST_DIM for dim in dims)
        and query.shape[1] <= _MOST_GROUP * key_cache.shape[2]
        and query.stride(2) == 1
        and query.stride(1) == query.shape[2]
    )


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    meta: AttentionMetadata,
    *,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    tokens, num_heads, key_dim = query.shape
    _, block_size, kv_heads, value_dim = value_cache.shape
    out = torch.empty((tokens, num_heads, value_dim), dtype=query.dtype)
    step = meta.plans.get("native")
    if step is None:
        extra, table = meta.extra, meta.block_table
        step = meta.plans["native"] = (
            (
                meta.rows.data_ptr(),
                meta.base.data_ptr(),
                0 if extra is None else extra.data_ptr(),
                table.data_ptr(),
            ),
            (table.shape[1], 0 if extra is None else extra.shape[1], meta.first),
            int(meta.base.sum()),
        )
    pointers, sizes, keys = step
    threads = torch.get_num_threads() if keys * num_heads * key_dim > _PARALLEL else 1
    library().specdec_paged_attention(  # type: ignore[union-attr]  # `takes` asked for it
        DTYPES[query.dtype],
        key_cache.dtype is torch.float8_e4m3fn,
        query.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        *pointers,
        out.data_ptr(),
        tokens,
        query.stride(0),
        num_heads,
        kv_heads,
        key_dim,
        value_dim,
        block_size,
        *sizes,
        window or 0,
        scale,
        threads,
    )
    return out
