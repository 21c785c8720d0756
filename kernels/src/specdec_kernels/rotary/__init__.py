"""Rotary position embedding (Su et al., arXiv 2104.09864)."""

from .reference import apply_rotary

__all__ = ["apply_rotary"]
