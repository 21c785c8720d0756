"""Gated activations of MLPs (GLU variants: Shazeer, arXiv 2002.05202)."""

from __future__ import annotations

from types import ModuleType

import torch

from ..gpu import takes
from . import native, reference


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of ``x = [gate, up]``: ``[..., 2 I] -> [..., I]``."""
    return _chosen(x).silu_and_mul(x)


def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    """``gelu(gate) * up`` with the tanh approximation: ``[..., 2 I] -> [..., I]``."""
    return _chosen(x).gelu_tanh_and_mul(x)


def _chosen(x: torch.Tensor) -> ModuleType:
    if native.can_gate(x):
        return native
    if takes(x):
        from . import gpu  # needs Triton

        if gpu.can_gate(x):
            return gpu
    return reference


__all__ = ["gelu_tanh_and_mul", "silu_and_mul"]
