"""Reduced draft vocabularies: the tokens that a target writes most."""

from __future__ import annotations

import torch
from specdecode.contract import ConfigError


def frequent_ids(counts: torch.Tensor, size: int) -> torch.Tensor:
    """``[size]`` int64, ascending: the ids that stand most often in the training answers; ties: lowest first.

    Raises:
        ConfigError: ``size`` is above the vocabulary's.
    """
    if not 1 <= size <= len(counts):
        raise ConfigError(f"draft_vocab_size must be between 1 and the target's {len(counts)}, got {size}")
    order = torch.argsort(counts.cpu(), descending=True, stable=True)
    return order[:size].sort().values


def coverage(counts: torch.Tensor, ids: torch.Tensor) -> float:
    """Share of the tokens of the training answers that are among ``ids``: those that can be drafted."""
    return float(counts[ids.cpu()].sum() / counts.sum().clamp(min=1))


def vocabulary_maps(ids: torch.Tensor, vocab_size: int) -> dict[str, torch.Tensor]:
    """The stored maps: ``d2t`` ``[Vd]`` int64, offsets from draft id to id, and ``t2d`` ``[V]`` bool."""
    kept = torch.zeros(vocab_size, dtype=torch.bool)
    kept[ids.cpu()] = True
    return {"d2t": ids.cpu() - torch.arange(len(ids)), "t2d": kept}
