"""KV write by the C++ kernels."""

from __future__ import annotations

import torch

from ..native import DTYPES, library, takes


def can_write(key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor) -> bool:
    """Whether the heads of a token lie side by side, in the cache's dtype or for one of float8_e4m3fn."""
    return (
        takes(key)
        and key.dtype is value.dtype
        and key_cache.dtype in (key.dtype, torch.float8_e4m3fn)
        and _whole(key)
        and _whole(value)
    )


def can_rotate_and_write(
    heads: torch.Tensor, cos: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor
) -> bool:
    """Whether heads are contiguous, keys and values of one size, and cosine and sine float32."""
    return (
        takes(heads)
        and heads.dtype is key_cache.dtype
        and key_cache.shape == value_cache.shape
        and cos.dtype is torch.float32
        and heads.is_contiguous()
    )


def rotate_and_write_kv(
    heads: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    tokens, count, dim = heads.shape
    kv_heads = key_cache.shape[2]
    query = torch.empty((tokens, count - 2 * kv_heads, dim), dtype=heads.dtype)
    library().specdec_rotate_and_write(  # type: ignore[union-attr]  # `takes` asked for it
        DTYPES[heads.dtype],
        heads.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        query.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        slots.data_ptr(),
        tokens,
        count - 2 * kv_heads,
        kv_heads,
        dim,
        cos.shape[-1],
    )
    return query


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    size = key.element_size()
    slots = slots.contiguous()
    if key_cache.dtype is not key.dtype:
        library().specdec_write_kv8(  # type: ignore[union-attr]
            DTYPES[key.dtype],
            key.data_ptr(),
            value.data_ptr(),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            slots.data_ptr(),
            key.shape[0],
            key.stride(0),
            value.stride(0),
            key.shape[1] * key.shape[2],
            value.shape[1] * value.shape[2],
        )
        return
    library().specdec_write_kv(  # type: ignore[union-attr]  # `takes` asked for it
        key.data_ptr(),
        value.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        slots.data_ptr(),
        key.shape[0],
        key.stride(0) * size,
        value.stride(0) * size,
        key.shape[1] * key.shape[2] * size,
        value.shape[1] * value.shape[2] * size,
    )


def _whole(heads: torch.Tensor) -> bool:
    return heads.stride(2) == 1 and heads.stride(1) == heads.shape[2]
