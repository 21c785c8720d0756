"""What drafts are worth: for each row and place the chance that a draft is accepted, as it was lately."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import attrs
import numpy as np

#: What a trial of a row counts after each later one of that row and place: some twenty trials matter.
ROW_DECAY = 0.95
#: The same of all rows together, by steps in which there was any.
ALL_DECAY = 0.98
#: So many trials of its own weigh as much as what is known of all rows.
ROW_PRIOR = 4.0
#: So many trials of all rows weigh as much as the place before.
ALL_PRIOR = 4.0
#: What fades of the trials of all rows in a step without any, as a share; so many are left at least.
FADING, FADED = 0.01, 64.0
#: Acceptance of which nothing is known.
UNKNOWN = 0.7


@attrs.frozen
class Verified:
    """One row's drafts and what became of them."""

    row: Hashable
    offered: int  #: how many it might have had
    drafted: int  #: how many the proposer made
    accepted: Sequence[int]  #: the accepted ones, by their places; of a chain the first
    scores: Sequence[float] = ()  #: the proposer's confidence in each draft; empty: it has none


class _Counts:
    """Decayed counts of something by row and place, and of all rows together."""

    def __init__(self, width: int) -> None:
        self.rows = np.zeros((2, 8, width))  #: tries and hits
        self.all = np.zeros((2, width))

    def add(self, slots: np.ndarray, tries: np.ndarray, hits: np.ndarray) -> None:
        """One step of rows in ``slots``; both ``[n, width]``, 0 or 1."""
        new = np.stack((tries, hits))
        self.rows[:, slots] = np.where(tries > 0, self.rows[:, slots] * ROW_DECAY + new, self.rows[:, slots])
        total = new.sum(1)
        self.all = np.where(total[0] > 0, self.all * ALL_DECAY, self.all) + total

    def rates(self, slots: np.ndarray, all_rates: np.ndarray) -> np.ndarray:
        """``[n, width]``; slot -1 is of a row of which nothing is known."""
        tries, hits = np.where((slots >= 0)[:, None], self.rows[:, slots], 0.0)
        rates: np.ndarray = (hits + ROW_PRIOR * all_rates) / (tries + ROW_PRIOR)
        return rates

    def all_rates(self, unknown: float) -> np.ndarray:
        """``[width]``; a place of which little is known goes by the one before, the first by ``unknown``."""
        rates, before = np.empty(self.all.shape[1]), unknown
        for place, (tries, hits) in enumerate(self.all.T):
            rates[place] = before = (hits + ALL_PRIOR * before) / (tries + ALL_PRIOR)
        return rates

    def fade(self) -> None:
        """A step went by without trials: texts change."""
        left = np.maximum(self.all[0] * (1 - FADING), np.minimum(self.all[0], FADED))
        self.all *= left / np.maximum(self.all[0], 1e-9)

    def grow(self) -> None:
        self.rows = np.concatenate((self.rows, np.zeros_like(self.rows)), axis=1)

    def clear(self, slot: int) -> None:
        self.rows[:, slot] = 0.0


class Acceptance:
    """Decayed counts by row and by place of a draft, shrunk towards those of all rows where they are few.

    In a chain a place is tried only where the draft before it was accepted. In a tree, whose first ``n``
    nodes are the tree of ``n`` nodes, a node's acceptance does not depend on what is drafted behind it.

    Args:
        width: most drafts of a row.
        chain: whether drafts are chains.
    """

    def __init__(self, width: int, *, chain: bool) -> None:
        self.width = width
        self.chain = chain
        self._slots: dict[Hashable, int] = {}
        self._free = list(range(8))
        self._accepted, self._made = _Counts(width), _Counts(width)

    def observe(self, step: Sequence[Verified]) -> None:
        """Count one step's verifications; rows that were offered nothing say nothing."""
        step = [own for own in step if own.offered]
        if not step:
            return
        slots = np.array([self._slot(own.row) for own in step])
        places = np.arange(self.width)
        offered, made = (
            (places < np.array(counts)[:, None]).astype(float)
            for counts in ([own.offered for own in step], [own.drafted for own in step])
        )
        hits = np.zeros_like(made)
        for index, own in enumerate(step):
            hits[index, list(own.accepted)] = 1.0
        self._made.add(slots, offered, made)
        tries = made * (places <= hits.sum(1, keepdims=True)) if self.chain else made
        self._accepted.add(slots, tries, hits)

    def fade(self) -> None:
        """Nothing is drafted in a step: what is known of all rows counts less beside what is learned next."""
        self._accepted.fade()
        self._made.fade()

    def forget(self, row: Hashable) -> None:
        """The row is over; its part in what is known of all stays."""
        slot = self._slots.pop(row, None)
        if slot is not None:
            self._free.append(slot)

    def gains(self, rows: Sequence[Hashable]) -> np.ndarray:
        """``[n, width]``: the chance that each draft of each row is accepted, if it is made; none rises."""
        rates = self._accepted.rates(self._of(rows), self._accepted.all_rates(UNKNOWN))
        return rates.cumprod(1) if self.chain else np.minimum.accumulate(rates, axis=1)

    def shares(self, rows: Sequence[Hashable]) -> np.ndarray:
        """``[n, width]``: the chance that each draft is made, if there is room for it."""
        return self._made.rates(self._of(rows), self._made.all_rates(1.0))

    def _of(self, rows: Sequence[Hashable]) -> np.ndarray:
        return np.array([self._slots.get(row, -1) for row in rows], dtype=int)

    def _slot(self, row: Hashable) -> int:
        slot = self._slots.get(row)
        if slot is not None:
            return slot
        if not self._free:
            count = len(self._slots)
            self._free = list(range(count, 2 * count))
            for counts in (self._accepted, self._made):
                counts.grow()
        slot = self._slots[row] = self._free.pop()
        for counts in (self._accepted, self._made):
            counts.clear(slot)
        return slot
