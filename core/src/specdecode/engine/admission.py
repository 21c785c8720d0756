"""When requests that wait are let in beside rows that decode in captured steps."""

from __future__ import annotations

import math
from collections import deque

#: Seconds over which the rate at which requests come is looked at.
_LATELY = 1.0
#: Pauses that are remembered: the least of them is what letting anybody in costs, however short the prompts.
_REMEMBERED = 16
#: How much of a new interval between two steps is believed.
_SHARE = 0.1


class Admission:
    """Lets requests come in together where that pays.

    Prompts are computed in a forward of their own, for which every row that decodes pauses, if only for a
    prompt of one token. So it may pay to let a request wait for the next one: as long as others come so often
    that the pauses they save, of all rows together, are longer than what is waited, and as long as those who
    wait have not waited, together, for as long as one pause of all rows takes (as whoever rents a thing buys
    it when the rents have come to its price).

    Times are seconds of the host's clock, which the caller gives.

    Args:
        longest: that a request may be put off; 0: none is.
    """

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._rate = 0.0  # requests let in a second, lately
        self._last: float | None = None  # when they were
        self._usual: float | None = None  # from step to step, if nobody is let in between
        self._pauses: deque[float] = deque(maxlen=_REMEMBERED)
        self._launch: float | None = None
        self._pausing = False  # somebody was let in since the last step
        self._since: float | None = None  # when the first of those that wait could have been let in
        self._looked = 0.0
        self._owed = 0.0  # seconds that those who wait have waited, all together

    @property
    def pause(self) -> float:
        """Seconds that letting requests in holds up who decodes, whatever their prompts; 0: not known yet."""
        return min(self._pauses, default=0.0)

    @property
    def delays(self) -> bool:
        """Whether anybody may be put off."""
        return self._longest > 0

    def puts_off(self, now: float, *, waiting: int, rows: int) -> bool:
        """Whether those who wait are to wait on.

        Args:
            waiting: requests that could be let in now.
            rows: requests that decode, and would pause for it.
        """
        if not (waiting and rows and self.delays):
            return False
        if self._since is None:
            self._since, self._owed = now, 0.0
        else:
            self._owed += waiting * (now - self._looked)
        self._looked = now
        pause = rows * self.pause
        return (
            now - self._since < self._longest
            and waiting < self._rate * pause  # else it is not worth a moment more
            and self._owed < pause
        )

    def let_in(self, now: float, count: int) -> None:
        """So many requests were let in; none: those who wait were refused for want of blocks."""
        self._since = None
        if not count:
            return
        self._pausing = True
        if self._last is not None:
            passed = max(now - self._last, 1e-6)
            self._rate += (1.0 - math.exp(-passed / _LATELY)) * (count / passed - self._rate)
        self._last = now

    def launched(self, now: float, *, alone: bool) -> None:
        """A step of who decodes was launched.

        Args:
            alone: nothing else was computed since the one before.
        """
        before, self._launch = self._launch, now
        pausing, self._pausing = self._pausing, False
        if before is None:
            return
        passed = now - before
        if alone:
            self._usual = passed if self._usual is None else self._usual + _SHARE * (passed - self._usual)
        elif pausing and self._usual is not None:
            self._pauses.append(max(0.0, passed - self._usual))

    def stood_up(self) -> None:
        """The next launch follows none."""
        self._launch = None
