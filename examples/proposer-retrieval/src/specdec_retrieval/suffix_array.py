"""A sorted list of all places of a text, in which every stretch of it is found by bisection."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

#: Stands behind each answer, so that no match reaches into the next one.
END = -1

Ints = NDArray[np.int32]


def sort_places(text: Ints, tokens: int) -> Ints:
    """The places of ``text``, :data:`END` aside, sorted by the first ``tokens`` tokens that stand there.

    By doubling (Manber and Myers, 1993): what is sorted by one token is sorted by 2, 4, 8, ..., each
    time by one sort of integers. Of equal places the earlier one comes first.

    Args:
        text: ``[N]``, its last entry :data:`END`.

    Returns:
        ``[N - number of ENDs]``.
    """
    size = len(text)
    order = np.argsort(text, kind="stable")
    rank = _ranks(text.astype(np.int64), order)
    length = 1
    while length < tokens and rank[order[-1]] < size - 1:
        key = rank * (size + 1)
        key[:-length] += rank[length:] + 1  # nothing: beyond the end of the text
        order = np.argsort(key, kind="stable")
        rank = _ranks(key, order)
        length *= 2
    return order[np.count_nonzero(text == END) :].astype(np.int32)


def _ranks(key: NDArray[np.int64], order: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each place how many different keys are smaller."""
    sorted_key = key[order]
    rank = np.empty_like(key)
    rank[order] = np.cumsum(np.concatenate(([0], sorted_key[1:] != sorted_key[:-1])))
    return rank


@attrs.frozen
class Match:
    """Where the end of a context stands in the text: at ``order[low:high]``, ``length`` tokens of it."""

    length: int
    low: int
    high: int


class SuffixArray:
    """Looks up stretches of a text; arrays that are mapped from files are read where they are touched.

    Args:
        text: ``[N]`` int32, answers with :data:`END` behind each.
        order: ``[T]`` int32, of :func:`sort_places`.
    """

    def __init__(self, text: Ints, order: Ints) -> None:
        self._text, self._order = text, order
        # One item of a memoryview is read in half the time that one of an array takes.
        self._tokens, self._places = text.data, order.data

    def find(self, wanted: Sequence[int], low: int = 0, high: int | None = None) -> tuple[int, int]:
        """The part of ``order``, ``low`` to ``high``, whose places begin with ``wanted``; empty: none do.

        Two bisections a token, so that the cost grows with the logarithm of the text's length.
        """
        tokens, places = self._tokens, self._places
        high = len(places) if high is None else high
        for offset, token in enumerate(wanted):

            def at(index: int, offset: int = offset) -> int:
                return tokens[places[index] + offset]

            low = bisect_left(range(high), token, low, high, key=at)
            high = bisect_right(range(high), token, low, high, key=at)
            if low == high:
                break
        return low, high

    def longest(self, context: Sequence[int], shortest: int) -> Match | None:
        """The longest end of ``context`` that occurs, of ``shortest`` tokens or more."""
        best = None
        least, most = shortest, len(context)
        while least <= most:  # where an end occurs, every shorter one does
            length = (least + most) // 2
            low, high = self.find(context[len(context) - length :])
            if low < high:
                best, least = Match(length, low, high), length + 1
            else:
                most = length - 1
        return best

    def continuations(self, match: Match, depth: int, most: int) -> Ints:
        """What stands behind the places of a match, the latest place first.

        Args:
            depth: tokens of each.
            most: places; of more every ``n``-th is taken in the order in which they are sorted, so that each
                continuation keeps its share.

        Returns:
            ``[places, depth]``, :data:`END` where an answer has ended.
        """
        count = match.high - match.low
        chosen = np.arange(min(count, most), dtype=np.int64) * count // min(count, most) + match.low
        places = np.sort(self._order[chosen])[::-1].astype(np.int64) + match.length
        rows: Ints = self._text[np.minimum(places[:, None] + np.arange(depth), len(self._text) - 1)]
        rows[np.logical_or.accumulate(rows == END, axis=1)] = END
        return rows
