"""When a request ends: stop ids, stop strings, length; looked at token by token, whatever a step brought."""

from __future__ import annotations

from collections.abc import Sequence

import attrs


@attrs.frozen
class Finish:
    """Why a request ended; ``stop_reason`` is the id or string that ended it, None for an EOS or a length."""

    reason: str
    stop_reason: int | str | None = None


def stop_at_token(
    token: int, num_output: int, *, min_tokens: int, eos_ids: frozenset[int], stop_ids: frozenset[int]
) -> Finish | None:
    """``num_output`` counts ``token``. Before ``min_tokens`` nothing stops."""
    if num_output < min_tokens:
        return None
    if token in stop_ids:
        return Finish("stop", token)
    if token in eos_ids:
        return Finish("stop")
    return None


@attrs.frozen
class StopString:
    """A stop string found: ``text[start:end]``."""

    string: str
    start: int
    end: int


def find_stop(text: str, new_chars: int, stops: Sequence[str]) -> StopString | None:
    """The stop string that begins first in ``text``, if one ends within its last ``new_chars`` characters."""
    best: StopString | None = None
    for stop in stops:
        start = text.find(stop, max(0, len(text) - new_chars - len(stop) + 1))
        if start >= 0 and (best is None or start < best.start):
            best = StopString(stop, start, start + len(stop))
    return best


def open_stop(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of ``text`` may be the beginning of a stop string."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest
