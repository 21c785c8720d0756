"""Draft trees that grow by confidence (EAGLE-2, arXiv 2406.16858): which nodes go on, and which are kept.

Each level's best ``K`` nodes get ``K`` children each. All that were drafted are *candidates*, in the order in
which they came: ``K`` of the first level, ``K * K`` of each other one. A candidate's score is the sum of its
path's log-confidences; no child scores above its parent, and of equals the older comes first.

Legend: ``B`` rows, ``n`` nodes of a level that have children (1 above the first level, then ``K``), ``C``
candidates.
"""

from __future__ import annotations

import torch

from ..gpu import takes
from . import reference
from .candidates import Candidates, Level, Tree, num_candidates


def extend(candidates: Candidates, above: Level | None, ids: torch.Tensor, scores: torch.Tensor) -> Level:
    """Add a level's candidates, and choose the best ``K`` of them to go on with.

    The confidences of siblings: scores above 0 are no log-probabilities (they hold the target's noise); where
    together they stand for more than all there can be they are taken relative to each other. -inf where a
    token cannot be drawn, or a score is NaN.

    Args:
        above: the level before, whose children these are; None: they are the root's.
        ids: ``[B, n, K]`` int64.
        scores: ``[B, n, K]`` float32.
    """
    if takes(scores):
        from . import gpu  # needs Triton

        if gpu.can_extend(scores):
            return gpu.extend(candidates, above, ids, scores)
    return reference.extend(candidates, above, ids, scores)


def keep(
    candidates: Candidates,
    room: torch.Tensor,
    width: int,
    budget: torch.Tensor | None = None,
    out: Tree | None = None,
) -> Tree:
    """The best ``width`` candidates, the best first; so they are closed under parents.

    Args:
        room: ``[B]`` int64, levels that a row may have.
        width: at most ``C``.
        budget: ``[B]`` int64, most nodes of each row; None: ``width``.
        out: written and returned; rows may lie further apart than they are long.
    """
    if takes(candidates.scores):
        from . import gpu

        if gpu.can_keep(candidates):
            return gpu.keep(candidates, room, width, budget, out)
    return reference.keep(candidates, room, width, budget, out)


__all__ = ["Candidates", "Level", "Tree", "extend", "keep", "num_candidates"]
