"""Gated activations of MLPs (GLU variants: Shazeer, arXiv 2002.05202)."""

from __future__ import annotations

import torch

from . import native, reference


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of ``x = [gate, up]``: ``[..., 2 I] -> [..., I]``."""
    return (native if native.can_gate(x) else reference).silu_and_mul(x)


def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    """``gelu(gate) * up`` with the tanh approximation: ``[..., 2 I] -> [..., I]``."""
    return (native if native.can_gate(x) else reference).gelu_tanh_and_mul(x)


__all__ = ["gelu_tanh_and_mul", "silu_and_mul"]
