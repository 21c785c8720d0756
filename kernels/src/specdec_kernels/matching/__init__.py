"""Prompt lookup (Saxena, 2023; "LLMA": Yang et al., arXiv 2304.04487) over the texts of a batch."""

from __future__ import annotations

import torch

from ..gpu import takes
from . import reference


def match_ngrams(
    history: torch.Tensor,
    lengths: torch.Tensor,
    *,
    shortest: int,
    longest: int,
    width: int,
    limits: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draft what followed the last tokens of each text when they last occurred in it.

    Of the windows of ``shortest`` to ``longest`` last tokens the longest that occurred before is taken, where
    it last did; something must have followed it. A window of ``n`` tokens is worth ``2**(n - 2)`` drafts (at
    least one), the longest is worth ``width``. What is copied goes round when the text ends.

    Args:
        history: ``[B, L]`` int32, the texts.
        lengths: ``[B]`` int64, their lengths, at most ``L``.
        shortest, longest: ``1 <= shortest <= longest``.
        width: the most drafts.
        limits: ``[B]`` int64, the most drafts of each row; 0 or less: none.

    Returns:
        ids ``[B, width]`` int64, 0 behind the drafts; how many there are, ``[B]`` int64; and the window that
        matched, ``[B]`` int64, 0 where there are none.
    """
    sizes = {"shortest": shortest, "longest": longest, "width": width}
    if history.is_cuda and takes() and history.stride(1) == 1:
        from . import gpu

        return gpu.match_ngrams(history, lengths, limits=limits, **sizes)
    return reference.match_ngrams(history, lengths, limits=limits, **sizes)


__all__ = ["match_ngrams"]
