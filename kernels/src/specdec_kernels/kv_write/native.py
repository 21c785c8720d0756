"""KV write by the C++ kernels."""

from __future__ import annotations

import torch

from ..native import library, takes


def can_write(key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor) -> bool:
    """Whether the heads of a token lie side by side, in the cache's dtype."""
    return takes(key) and key.dtype is value.dtype is key_cache.dtype and _whole(key) and _whole(value)


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    size = key.element_size()
    slots = slots.contiguous()
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
