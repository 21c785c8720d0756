"""What penalties know of a request: how often it has used which token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from specdecode.api.params import SamplingParams


def needs_history(params: SamplingParams) -> bool:
    """Whether drawing under ``params`` depends on the tokens before."""
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1)


class TokenHistory:
    """The distinct tokens of one request and how often its output holds each.

    Grows with the committed output and is never cut back; drafts that are not committed are given
    to :meth:`counts` as a path.
    """

    __slots__ = ("_counts", "_ids", "_slots")

    def __init__(self, prompt_ids: Sequence[int] | np.ndarray) -> None:
        self._ids = np.unique(np.asarray(prompt_ids, dtype=np.int64))
        self._counts = np.zeros(len(self._ids), dtype=np.int64)
        self._slots = {token: slot for slot, token in enumerate(self._ids.tolist())}

    def __len__(self) -> int:
        """Distinct tokens of prompt and output."""
        return len(self._slots)

    def extend(self, output_ids: Iterable[int]) -> None:
        """Count tokens that became part of the output."""
        for token in output_ids:
            slot = self._slots.setdefault(int(token), len(self._slots))
            if slot == len(self._ids):
                self._grow()
            self._ids[slot] = token
            self._counts[slot] += 1

    def counts(self, path: Sequence[int] = ()) -> tuple[np.ndarray, np.ndarray]:
        """Distinct ids and their occurrences in the output followed by ``path``; 0: prompt only.

        Without a path these are views that the next :meth:`extend` changes.

        Returns:
            ``[N]`` int64 ids, each once, in no particular order, and ``[N]`` int64 counts.
        """
        ids, counts = self._ids[: len(self._slots)], self._counts[: len(self._slots)]
        if not path:
            return ids, counts
        counts = counts.copy()
        new: dict[int, int] = {}
        for token in path:
            slot = self._slots.get(int(token))
            if slot is None:
                new[int(token)] = new.get(int(token), 0) + 1
            else:
                counts[slot] += 1
        if not new:
            return ids, counts
        extra = np.array([*new.items()], dtype=np.int64)
        return np.concatenate((ids, extra[:, 0])), np.concatenate((counts, extra[:, 1]))

    def _grow(self) -> None:
        room = max(64, len(self._ids))
        self._ids = np.concatenate((self._ids, np.zeros(room, dtype=np.int64)))
        self._counts = np.concatenate((self._counts, np.zeros(room, dtype=np.int64)))
