"""What a proposer's confidence is worth: how often drafts of a score were accepted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .acceptance import ALL_DECAY, Verified

#: Scores told apart: tenths of 0..1.
BINS = 10
#: So many trials of a score weigh as much as what is known without it.
PRIOR = 8.0


class ScoreScale:
    """For scores of 0 to 1 the share of drafts that were accepted; whatever a method means by its scores."""

    def __init__(self) -> None:
        self._tries, self._hits = np.zeros((2, BINS))

    def observe(self, step: Sequence[Verified]) -> None:
        """Count the drafts of one step that had scores."""
        step = [own for own in step if own.scores]
        if not step:
            return
        scores = np.concatenate([np.asarray(own.scores, float) for own in step])
        hits = np.concatenate([np.isin(np.arange(len(own.scores)), own.accepted) for own in step])
        tries = np.bincount(_bins(scores), minlength=BINS)
        decay = np.where(tries > 0, ALL_DECAY, 1.0)
        self._tries = self._tries * decay + tries
        self._hits = self._hits * decay + np.bincount(_bins(scores), hits, minlength=BINS)

    def gains(self, scores: np.ndarray, without: np.ndarray) -> np.ndarray:
        """The chance that drafts of these scores are accepted; of their shape.

        Args:
            without: of the same shape, the chance as it is known without scores.
        """
        bins = _bins(scores)
        chances: np.ndarray = (self._hits[bins] + PRIOR * without) / (self._tries[bins] + PRIOR)
        return chances


def _bins(scores: np.ndarray) -> np.ndarray:
    return np.nan_to_num(scores * BINS).astype(int).clip(0, BINS - 1)
