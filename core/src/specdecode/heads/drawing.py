"""How heads choose tokens: over the target's vocabulary, with its noise or their best."""

from __future__ import annotations

import torch
from specdec_kernels.sampling import rank_tokens

from ..contract import StepView


def draw(
    step: StepView,
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    count: int,
    *,
    greedy: bool,
    vocabulary: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` tokens that a head drafts behind each of ``T`` places, the best first.

    Args:
        logits: ``[T, Vd]`` float.
        rows, positions, vocabulary: as :meth:`~specdecode.contract.StepView.sample` takes them.
        greedy: a sampled request's drafts are the head's best tokens, too (``draft_sample_method``).

    Returns:
        ids ``[T, count]`` int64 and scores ``[T, count]`` float32, log-probabilities, with noise where
        there is some.
    """
    if not greedy:
        return step.sample(logits, rows, positions, count, vocabulary=vocabulary)
    # Without a temperature there is no noise, whatever its keys.
    return rank_tokens(
        logits, positions, k=count, seed=positions, index=positions, temperature=None, ids=vocabulary
    )
