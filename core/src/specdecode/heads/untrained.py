"""Weights of checkpoints that nobody trained, for tests of methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

STD = 0.02  #: of a model's weights, as they are usually initialised


class RandomWeights:
    """Draws weights one after the other; equal seeds and equal calls, equal weights."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, std: float = STD) -> torch.Tensor:
        """``shape`` float32, around 0."""
        return torch.randn(shape, generator=self.generator) * std

    def norm(self, size: int) -> torch.Tensor:
        """``[size]`` float32, the gain of a norm: around 1."""
        return 1.0 + 0.1 * torch.randn(size, generator=self.generator)


def altered(
    held: Mapping[str, torch.Tensor], more: Mapping[str, torch.Tensor] | None, drop: Sequence[str]
) -> dict[str, torch.Tensor]:
    """``held`` with ``more``, and without ``drop``: what faulty checkpoints are made of."""
    return {name: tensor for name, tensor in {**held, **(more or {})}.items() if name not in drop}


def speculators_config(algorithm: str, architectures: Sequence[str], tokens: int = 3) -> dict[str, Any]:
    """``speculators_config`` of the speculators format: greedy chains of ``tokens``, for nobody's target."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [proposal],
        "verifier": {"name_or_path": "nobody/target", "architectures": list(architectures)},
    }
