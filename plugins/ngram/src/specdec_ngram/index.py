"""Where each n-gram of a growing text last occurred."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice


class NgramIndex:
    """The n-grams of one text, ``shortest`` to ``longest`` tokens long.

    The text belongs to the caller and only grows. Catching up with ``t`` new tokens makes
    ``t * (longest - shortest + 1)`` entries, and a lookup reads at most one entry for each window,
    however long the text is.
    """

    __slots__ = ("_indexed", "_longest", "_next", "_shortest")

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest
        #: n-gram -> position of the token after its most recent occurrence
        self._next: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def extend(self, text: Sequence[int], length: int | None = None) -> None:
        """Catch up with the first ``length`` tokens of ``text``; None: with all.

        An n-gram is entered once a token follows it: nothing could be copied from behind the last
        one, and the tail that is looked up cannot match itself.
        """
        end = (len(text) if length is None else length) - 1
        if end <= self._indexed:
            return
        for n in range(self._shortest, self._longest + 1):
            first = max(self._indexed + 1, n)
            tokens = text[first - n : end]
            # zip stops at the shortest slice: exactly the n-grams that end at first..end
            grams = zip(*(islice(tokens, i, None) for i in range(n)), strict=False)
            self._next.update(zip(grams, range(first, end + 1), strict=False))
        self._indexed = end

    def match(self, text: Sequence[int]) -> tuple[int, int] | None:
        """Where the longest n-gram that ends ``text`` last occurred before, and its length.

        The position is that of the token after it. None if no window matches. ``text`` is the one
        that :meth:`extend` has caught up with, or goes on from there.
        """
        tail = tuple(text[-self._longest :])
        for n in range(min(self._longest, len(tail)), self._shortest - 1, -1):
            start = self._next.get(tail[-n:])
            if start is not None:
                return start, n
        return None
