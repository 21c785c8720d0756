"""Seeds of requests: what a user gave, or one that no other request of the engine has."""

from __future__ import annotations

import secrets

_BITS = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


class UnseededStream:
    """Seeds for requests that came without one: 2**64 of them before any repeats.

    SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): a counter with an odd stride through a
    bijection. The engine's seed fixes the sequence, so that a run in the same order repeats; None
    takes one from the operating system.
    """

    def __init__(self, engine_seed: int | None = None) -> None:
        start = secrets.randbits(64) if engine_seed is None else engine_seed & _BITS
        # Mixed, so that engines with neighbouring seeds do not walk the same orbit a step apart.
        self._state = _mix(start ^ _GOLDEN)

    def next(self) -> int:
        """The next seed, in ``-2**63..2**63-1``."""
        self._state = (self._state + _GOLDEN) & _BITS
        return _signed(_mix(self._state))


def resolve_seed(seed: int | None, unseeded: UnseededStream) -> int:
    """The 64 bits that key a request's noise, as a signed integer that fits an int64 tensor.

    A user's seed counts modulo 2**64: negative ones and longer ones are fine, and ``s`` and
    ``s + 2**64`` are the same seed. None, and -1 as in vLLM, take the next of ``unseeded``.
    """
    if seed is None or seed == -1:
        return unseeded.next()
    return _signed(int(seed) & _BITS)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _mix(word: int) -> int:
    word = ((word ^ word >> 30) * 0xBF58476D1CE4E5B9) & _BITS
    word = ((word ^ word >> 27) * 0x94D049BB133111EB) & _BITS
    return word ^ word >> 31
