"""Attention over the paged KV cache, behind a small backend interface."""

from __future__ import annotations

from typing import Protocol, TypeAlias

import torch
from specdec_kernels.attention import AttentionMetadata, paged_attention
from specdec_kernels.kv_write import rotate_and_write_kv, write_kv

#: Keys and values of one layer: ``[num_blocks, block_size, Hkv, Dk]`` and ``[..., Dv]``.
KVCache: TypeAlias = tuple[torch.Tensor, torch.Tensor]
#: Cosine and sine of the step's positions, each ``[T, R/2]``.
Rotation: TypeAlias = tuple[torch.Tensor, torch.Tensor]


class AttentionBackend(Protocol):
    """How keys and values are stored and read; everything it needs to know of the step is in ``meta``."""

    def write(self, key: torch.Tensor, value: torch.Tensor, cache: KVCache, meta: AttentionMetadata) -> None:
        """Store ``[T, Hkv, D]`` keys and values in the slots ``meta.write_slots``."""

    def attend(
        self,
        query: torch.Tensor,
        cache: KVCache,
        meta: AttentionMetadata,
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """``[T, Hq, Dk]`` queries over the slots that ``meta`` lets each see: ``[T, Hq, Dv]``."""


class RotatingBackend(AttentionBackend, Protocol):
    """One that takes a fused projection whole, as the native decoder gives it."""

    def rotate_and_write(
        self, heads: torch.Tensor, rotation: Rotation, cache: KVCache, meta: AttentionMetadata
    ) -> torch.Tensor:
        """Rotate and :meth:`write` what ``[T, Hq + 2 Hkv, D]`` holds: the queries, ``[T, Hq, D]``."""


class TorchBackend:
    """The kernels as they are: C++ on a CPU, else their torch references."""

    def write(self, key: torch.Tensor, value: torch.Tensor, cache: KVCache, meta: AttentionMetadata) -> None:
        write_kv(key, value, *cache, meta.write_slots)

    def rotate_and_write(
        self, heads: torch.Tensor, rotation: Rotation, cache: KVCache, meta: AttentionMetadata
    ) -> torch.Tensor:
        return rotate_and_write_kv(heads, *rotation, *cache, meta.write_slots)

    def attend(
        self,
        query: torch.Tensor,
        cache: KVCache,
        meta: AttentionMetadata,
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        # What wrote keys and values stands between this and whatever made ``meta``.
        return paged_attention(query, *cache, meta, scale=scale, window=window, settled=True)


class Attention(torch.nn.Module):
    """Writes this step's keys and values, and then attends; has no weights.

    Args:
        scale: factor of the scores, as a rule ``head_dim ** -0.5``.
        window: sliding window in positions, None for full attention.
        backend: None: the torch references.
    """

    def __init__(
        self, scale: float, *, window: int | None = None, backend: RotatingBackend | None = None
    ) -> None:
        super().__init__()
        self.scale = scale
        self.window = window
        self.backend = backend or TorchBackend()

    def write(self, key: torch.Tensor, value: torch.Tensor, meta: AttentionMetadata, cache: KVCache) -> None:
        """Store ``[T, Hkv, Dk]`` keys and ``[T, Hkv, Dv]`` values."""
        self.backend.write(key, value, cache, meta)

    def rotate_and_write(
        self, heads: torch.Tensor, rotation: Rotation, meta: AttentionMetadata, cache: KVCache
    ) -> torch.Tensor:
        """The same from a fused projection: ``[T, Hq + 2 Hkv, D]``, not rotated yet, to ``[T, Hq, D]``."""
        return self.backend.rotate_and_write(heads, rotation, cache, meta)

    def attend(self, query: torch.Tensor, meta: AttentionMetadata, cache: KVCache) -> torch.Tensor:
        """``[T, Hq, Dk]`` over what is stored: ``[T, Hq, Dv]``."""
        return self.backend.attend(query, cache, meta, scale=self.scale, window=self.window)
