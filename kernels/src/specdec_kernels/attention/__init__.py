"""Attention of query tokens over a paged KV cache."""

from .exact import paged_attention_exact
from .metadata import AttentionMetadata
from .reference import paged_attention

__all__ = ["AttentionMetadata", "paged_attention", "paged_attention_exact"]
