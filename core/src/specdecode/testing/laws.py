"""Whether draws have the law they should: one test for samplers, verifiers and drafters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

#: A correct sampler fails a law test this rarely; with fixed seeds, never or always.
SMALLEST_PVALUE = 1e-6
# Bins expected to hold fewer draws than this are pooled: the G statistic's law is asymptotic.
_SMALLEST_EXPECTED = 5.0


def count(draws: Sequence[int] | np.ndarray | torch.Tensor, size: int) -> np.ndarray:
    """Occurrences of ``0..size-1`` among ``draws``, ``[size]`` int64."""
    return np.bincount(np.asarray(draws), minlength=size)


def law_pvalue(counts: Sequence[int] | np.ndarray, probs: Sequence[float] | np.ndarray) -> float:
    """P-value of a G-test: how often a true sampler strays this far from ``probs`` or farther.

    Outcomes of probability 0 are left to :func:`outside_support`; rare ones are pooled.

    Args:
        counts: ``[V]`` occurrences of each outcome.
        probs: ``[V]`` the law; sums to 1.
    """
    counts, probs = np.asarray(counts, dtype=np.float64), np.asarray(probs, dtype=np.float64)
    if counts.shape != probs.shape or not np.isclose(probs.sum(), 1.0, atol=1e-6):
        raise ValueError(
            f"a law of {counts.shape} outcomes must have that many probabilities with sum 1, "
            f"got {probs.shape} with sum {probs.sum()}"
        )
    counts, expected = counts[probs > 0], counts[probs > 0].sum() * probs[probs > 0]
    rare = expected < _SMALLEST_EXPECTED
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    if len(counts) < 2:
        return 1.0
    observed = counts > 0
    statistic = 2.0 * float((counts[observed] * np.log(counts[observed] / expected[observed])).sum())
    half = torch.tensor([(len(counts) - 1) / 2, max(statistic, 0.0) / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def outside_support(counts: Sequence[int] | np.ndarray, probs: Sequence[float] | np.ndarray) -> list[int]:
    """Outcomes that were drawn although their probability is 0."""
    return np.flatnonzero((np.asarray(counts) > 0) & (np.asarray(probs) == 0)).tolist()


def assert_law(draws: Sequence[int] | np.ndarray | torch.Tensor, probs: Sequence[float] | np.ndarray) -> None:
    """Fail unless ``draws`` can come from ``probs`` and never leave its support."""
    counts = count(draws, len(probs))
    if outside := outside_support(counts, probs):
        raise AssertionError(f"outcomes of probability 0 were drawn: {outside}")
    pvalue = law_pvalue(counts, probs)
    if pvalue < SMALLEST_PVALUE:
        expected = np.round(counts.sum() * np.asarray(probs), 1).tolist()
        raise AssertionError(f"wrong law: p = {pvalue:.2g}; drawn {counts.tolist()}, expected {expected}")
