"""Rotary position embedding (Su et al., arXiv 2104.09864)."""

from .reference import apply_rotary, rotate

__all__ = ["apply_rotary", "rotate"]
