"""Writing new keys and values into a paged KV cache."""

from .reference import write_kv

__all__ = ["write_kv"]
