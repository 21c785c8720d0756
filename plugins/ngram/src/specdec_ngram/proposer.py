"""Prompt lookup as a proposer: one index a request, over that request's own tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from specdecode.contract import MAX_SPECULATIVE_TOKENS, Drafts, Proposer, RequestInfo, StepView

from .config import NgramConfig
from .index import NgramIndex


class NgramProposer(Proposer):
    """Drafts what followed the last tokens of a request when they last occurred in it.

    Prompt lookup (Saxena, 2023; "LLMA": Yang et al., arXiv 2304.04487). The index derives from
    tokens alone: it survives a preemption, and catches up with the request's history when drafts
    are wanted, so a request that never drafts costs nothing.
    """

    def __init__(self, config: NgramConfig) -> None:
        self._shortest, self._longest = config.windows
        self._indexes: dict[str, NgramIndex] = {}
        self._lookups = 0
        self._hits = 0

    def on_add(self, request: RequestInfo) -> None:
        if request.id not in self._indexes:
            self._indexes[request.id] = NgramIndex(self._shortest, self._longest)

    def on_finish(self, request_id: str, reason: str) -> None:
        self._indexes.pop(request_id, None)

    def propose(self, step: StepView, out: Drafts) -> None:
        limits = np.minimum(step.budget, step.room)
        rows = np.flatnonzero(limits > 0)
        if not rows.size:
            return
        request_ids, histories, drafted = step.request_ids, step.history, step.drafted
        for row in rows.tolist():
            index, history = self._indexes[request_ids[row]], histories[row]
            # Drafts of another, which we are to go on from, are looked up and not learnt.
            index.extend(history, None if drafted is None else len(history) - int(drafted[row]))
            self._lookups += 1
            match = index.match(history)
            if match is not None:
                self._hits += 1
                start, window = match
                length = min(int(limits[row]), trusted_length(window, self._longest))
                out.ids[row, :length] = continuation(history, start, length)
                out.lens[row] = length
                out.score[row, :length] = chance(window) ** np.arange(1, length + 1)

    def metrics(self) -> Mapping[str, float]:
        return {"lookups": float(self._lookups), "hits": float(self._hits)}

    def close(self) -> None:
        self._indexes.clear()


#: Chance that a match of 1, 2, ... tokens goes on for one more, as the acceptance measured by window has it
#: (see the README); of 5 and more the last.
CHANCES = (0.31, 0.55, 0.75, 0.83, 0.92)


def chance(window: int) -> float:
    """That one more draft behind a match of ``window`` tokens is accepted."""
    return CHANCES[min(window, len(CHANCES)) - 1]


def trusted_length(window: int, longest: int) -> int:
    """How many tokens to copy from behind a match of ``window`` tokens.

    A short match says little: two tokens are worth one draft, three two, four four. One of the
    longest window asked for is worth all that may be drafted.
    """
    return MAX_SPECULATIVE_TOKENS if window == longest else 1 << max(window - 2, 0)


def continuation(text: Sequence[int], start: int, length: int) -> list[int]:
    """``length`` tokens as they follow ``start``, going round when the text ends.

    The match lies ``len(text) - start`` tokens back. Read as a period, it says what comes after the
    end of the text as well: "a b a b" matched at distance 2 goes on "a b a b ...".
    """
    period = text[start : start + length]
    rounds = -(-length // len(period))
    return (list(period) * rounds)[:length]
