"""Attention of query tokens over a paged KV cache."""

from .metadata import AttentionMetadata
from .reference import paged_attention

__all__ = ["AttentionMetadata", "paged_attention"]
