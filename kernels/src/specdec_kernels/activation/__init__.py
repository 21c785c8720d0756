"""Gated activations of MLPs (GLU variants: Shazeer, arXiv 2002.05202)."""

from .reference import gelu_tanh_and_mul, silu_and_mul

__all__ = ["gelu_tanh_and_mul", "silu_and_mul"]
