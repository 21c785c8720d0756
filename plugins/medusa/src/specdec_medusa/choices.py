"""Which nodes a Medusa tree has: the authors' published choice, and the search for one. Pure, no torch.

A node is the ranks that lead to it, ``(r0, r1)``: rank ``r0`` of the first head, then ``r1`` of the second.
Choices are listed by merit, each behind its parent, so that the first ``n`` of them are the choice of ``n``.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

Path = tuple[int, ...]

#: The tree of 63 nodes that Medusa drafts by default (``mc_sim_7b_63``; arXiv 2401.10774, figure 6): a digit
#: a rank, by merit.
_MC_SIM_7B_63 = (
    "0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21 004 "
    "005 0000 011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001 16 070"
)

#: Name of a published choice -> its nodes.
PUBLISHED: dict[str, tuple[Path, ...]] = {
    "mc_sim_7b_63": tuple(tuple(map(int, node)) for node in _MC_SIM_7B_63.split()),
}


def search_tree(accuracies: Sequence[Sequence[float]], nodes: int) -> list[Path]:
    """The tree of ``nodes`` nodes that foresees most tokens, by merit (arXiv 2401.10774, section 2.3.3).

    The chance that a node is right is taken for the product of its path's accuracies, and the sum over all
    nodes is the expected number of accepted drafts. Adding the best node that is not there yet, one after the
    other, is optimal, since no node is better than its parent.

    Args:
        accuracies: ``accuracies[i][r]``: how often the token of rank ``r`` of head ``i`` was right, 0 to 1.
        nodes: how many to choose, at least 1; fewer are chosen where the others are never right.

    Raises:
        ValueError: an accuracy is none, or those of one head add up to more than 1.
    """
    if nodes < 1:
        raise ValueError(f"nodes must be at least 1, got {nodes}")
    for head, ranks in enumerate(accuracies):
        if any(not 0 <= share <= 1 for share in ranks) or math.fsum(ranks) > 1 + 1e-6:
            raise ValueError(
                f"accuracies of head {head} must be shares of at most 1 in all, got {list(ranks)}"
            )
    chosen: list[Path] = []
    heap: list[tuple[float, int, Path]] = []

    def offer(parent: Path, chance: float) -> None:
        if len(parent) < len(accuracies):
            for rank, share in enumerate(accuracies[len(parent)]):
                if chance * share > 0:
                    path = (*parent, rank)
                    heapq.heappush(heap, (-chance * share, len(path), path))

    offer((), 1.0)
    while heap and len(chosen) < nodes:
        chance, _, path = heapq.heappop(heap)
        chosen.append(path)
        offer(path, -chance)
    return chosen


def expected_tokens(accuracies: Sequence[Sequence[float]], choices: Sequence[Path]) -> float:
    """Mean tokens of a verification of ``choices``, the target's own counted, by the same estimate."""
    return 1 + math.fsum(
        math.prod(accuracies[level][rank] for level, rank in enumerate(path)) for path in choices
    )


def within(choices: Sequence[Path], *, heads: int, nodes: int | None) -> list[Path]:
    """The best of ``choices`` that so many heads can fill, at most ``nodes`` of them."""
    kept = [path for path in choices if len(path) <= heads]
    return kept if nodes is None else kept[:nodes]
