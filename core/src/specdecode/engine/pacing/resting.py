"""Leaving the proposer out where no draft pays, and what it takes to have it back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import numpy as np

from .choice import expected_tokens
from .costs import NEW, bucket

#: Choices of a load in a row that found no draft to pay, until the proposer rests.
STREAK = 32
#: What waking must promise, as a share of tokens a second.
WAKE_MARGIN = 0.03
#: Steps ahead, at most, by which it must have paid: texts end and loads change.
HORIZON = 128
#: What standing up to catch up costs beside the tokens, in plain steps.
STAND_UP = 2.0


@attrs.frozen
class Gaps:
    """How far the entries of a proposer that rested are behind, row by row."""

    behind: Sequence[int]  #: tokens to compute again before the row may draft; 0: none
    left: Sequence[int]  #: tokens that it may still be given


@attrs.frozen
class Waking:
    """Drafting again, for more rows."""

    width: int
    rows: tuple[int, ...]  #: places of those that are to catch up; there are some
    saving: float  #: seconds, what catching up costs taken off


def best_waking(
    gains: np.ndarray,
    limits: Sequence[int],
    widths: Sequence[int],
    gaps: Gaps,
    *,
    seconds: Callable[[int], float],
    again: float,
    rate: float,
) -> Waking | None:
    """Who is worth to catch up, to draft again; None: nobody.

    Each row is weighed by itself: what its drafts would gain as long as it goes on against the tokens that
    are computed again. One that is too dear stays without drafts until it ends.

    Args:
        gains: ``[n, W]``, the chance that each draft of each row is made and accepted.
        limits: most drafts of each row.
        widths: ascending, 0 among them.
        seconds: ``seconds(width)`` of a step, 0 being the plain one without the proposer.
        again: seconds of a token that is computed again.
        rate: tokens a second as things are.
    """
    behind, left, most = (np.asarray(own) for own in (gaps.behind, gaps.left, limits))
    ahead = float(np.minimum(left, HORIZON).sum())  # tokens
    gained_by = np.concatenate((np.zeros((len(gains), 1)), gains.cumsum(1)), axis=1)
    found: Waking | None = None
    for width in widths[1:]:
        gained = gained_by[np.arange(len(gains)), np.minimum(most, width)]
        if (len(gains) + gained.sum()) / seconds(width) < rate * (1.0 + WAKE_MARGIN):
            continue  # not even with everybody
        worth = gained * np.minimum(left / (1.0 + gained), HORIZON) / rate
        caught_up = (behind > 0) & (behind * again < worth)
        able = np.where((behind == 0) | caught_up, most, 0)
        then = expected_tokens(gains, able.tolist(), width) / seconds(width)
        if not caught_up.any() or then < rate * (1.0 + WAKE_MARGIN):
            continue
        cost = again * float(behind[caught_up].sum()) + STAND_UP * seconds(0)
        saving = ahead * (1.0 / rate - 1.0 / then) - cost
        if saving > (0.0 if found is None else found.saving):
            found = Waking(width, tuple(map(int, np.flatnonzero(caught_up))), saving)
    return found


@attrs.define
class Rest:
    """Whether the proposer rests, and what a plain step costs without it."""

    on: bool = False
    known: dict[int, float] = attrs.Factory(dict)  #: load -> cost over the fed step's, as measured before
    _shares: dict[int, tuple[float, int]] = attrs.Factory(
        dict
    )  # load -> the same by so many timings of steps
    _streak: int = 0
    _load: int = 0  # of the streak

    def found_no_gain(self, rows: int) -> bool:
        """Count a choice by which no draft would ever pay; whether the proposer rests from now on."""
        self._streak = self._streak + 1 if bucket(rows) == self._load else 1
        self._load = bucket(rows)
        self.on = self._streak >= STREAK
        return self.on

    def over(self) -> None:
        """Something pays."""
        self.on, self._streak = False, 0

    def share(self, rows: int) -> float:
        """What a plain step costs without the proposer, over what it costs with it."""
        load = bucket(rows)
        return self._shares.get(load, (self.known.get(load, 1.0), 0))[0]

    def learn(self, rows: int, share: float) -> bool:
        """A plain step without the proposer cost so much of one with it; False if enough such are known."""
        load = bucket(rows)
        mean, count = self._shares.get(load, (self.known.get(load, 1.0), int(load in self.known)))
        if count >= NEW:
            return False
        self._shares[load] = min(1.0, (mean * count + share) / (1 + count)), count + 1
        return True

    def anew(self) -> Rest:
        """Without what was learned."""
        return Rest(known=self.known)
