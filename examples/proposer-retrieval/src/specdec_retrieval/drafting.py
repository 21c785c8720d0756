"""Which of several continuations are drafted, and how sure they are."""

from __future__ import annotations

import heapq
import itertools

import attrs
import numpy as np
from numpy.typing import NDArray

from .suffix_array import END, Ints

#: Chance that a match of 1, 2, ... tokens goes on for one more token, where all matches agree, as
#: measured (see the README); of more tokens the last.
CHANCES = (0.5, 0.6, 0.8, 0.8, 0.85, 0.95)


def chance(matched: int) -> float:
    """How far a match of ``matched`` tokens can be trusted for each token behind it."""
    return CHANCES[min(matched, len(CHANCES)) - 1]


@attrs.define
class Draft:
    """Nodes, a parent before its child; the score of a node is the chance of it and all above it."""

    token_ids: list[int] = attrs.Factory(list)
    parents: list[int] = attrs.Factory(list)  #: -1 = the last token of the context
    scores: list[float] = attrs.Factory(list)


def most_frequent(rows: Ints, trust: float, *, most: int, least_score: float, tree: bool) -> Draft:
    """The likeliest continuations: at most ``most`` nodes whose score is ``least_score`` or more.

    The score of a node is the share of the rows that go its way, times ``trust`` for each token. A chain
    takes the most frequent token at each level, a tree whatever has the highest score. Of equally frequent
    tokens the one that stands higher in ``rows`` is first.

    Args:
        rows: ``[matches, depth]``, :data:`~.suffix_array.END` where one has ended.
    """
    draft, turn = Draft(), itertools.count()
    waiting: list[tuple[float, int, int, int, int, NDArray[np.int64]]] = []

    def consider(members: NDArray[np.int64], level: int, parent: int, score: float) -> None:
        """What may follow a node, for the rows that have come there."""
        if level == rows.shape[1]:
            return
        ways = _ways(rows[members, level])
        for token, count in ways if tree else ways[:1]:
            there = members[rows[members, level] == token]
            reached = score * trust * count / len(members)
            if reached >= least_score:
                heapq.heappush(waiting, (-reached, next(turn), level, parent, token, there))

    consider(np.arange(len(rows)), 0, -1, 1.0)
    while waiting and len(draft.token_ids) < most:
        negative, _, level, parent, token, members = heapq.heappop(waiting)
        node = len(draft.token_ids)
        draft.token_ids.append(token)
        draft.parents.append(parent)
        draft.scores.append(-negative)
        consider(members, level + 1, node, -negative)
    return draft


def _ways(tokens: Ints) -> list[tuple[int, int]]:
    """Each token and how often it occurs, the most frequent first; where an answer ended there is none."""
    values, first, counts = np.unique(tokens, return_index=True, return_counts=True)
    ranked = np.lexsort((first, -counts))
    return [(int(values[i]), int(counts[i])) for i in ranked if values[i] != END]
