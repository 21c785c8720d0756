"""Paged KV: bookkeeping without torch (pool, table, keys), and the tensors (store)."""

from .keys import ContentMark
from .pool import BlockPool, PoolExhausted
from .table import BlockTable

__all__ = ["BlockPool", "BlockTable", "ContentMark", "PoolExhausted"]
