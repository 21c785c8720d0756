"""Random streams of a request: draws that must be independent of each other. Imports no torch."""

from __future__ import annotations

import enum


class Stream(enum.IntEnum):
    """What a draw is for. Noise of one key and two streams is independent."""

    TARGET = 0  #: the target's own tokens; residual draws are such too
    DRAFT = 1  #: a drafter's tokens, under rules that weigh its probabilities
    ACCEPT = 2  #: whether a draft is accepted

    def keyed(self, base: int | None = None) -> int:
        """The stream's number in a noise key.

        Args:
            base: the position of the first token drafted in the step, if draws of one position in
                different steps must be independent: less than ``2**30``.
        """
        return self if base is None else self | (base + 1) << 2
