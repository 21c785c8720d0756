"""Weights of checkpoints that nobody trained, for tests of methods."""

from __future__ import annotations

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
