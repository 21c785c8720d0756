"""Verification: which drafts become output, and which token follows them."""

from .base import Rule, Verdict, rule
from .invariant import walk

__all__ = ["Rule", "Verdict", "rule", "walk"]
