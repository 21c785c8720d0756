"""What steps cost now: a measured curve, corrected by each step that is timed."""

from __future__ import annotations

import bisect
from math import inf

import attrs

from ...contract import CostCurve
from .curve import MeasuredCurve

#: How much of a surprise at a known size is laid to it alone, and to all sizes of that load.
OWN_SHARE, COMMON_SHARE = 0.05, 0.1
#: Timings of a size until it is known; the mean of these is what it costs.
NEW = 4
#: Most that one timing of a known size may be off, as a share: a hiccup of the machine counts no more.
MOST = 0.5
#: How much of a surprise about drafting is believed.
DRAFT_SHARE = 0.2


#: Seconds that every step takes.
LEAST = 1e-6
#: As long as nothing was measured.
FLAT: CostCurve = MeasuredCurve({(1, 1): 1.0, (2, 1): 1.0})


def bucket(rows: int) -> int:
    """Row counts that are held for one: the powers of two."""
    return 1 << max(0, rows - 1).bit_length()


@attrs.define
class _Load:
    """What steps of a number of rows cost more than the curve says."""

    common: float = 0.0  #: whatever they verify: longer texts, a busy host
    own: dict[int, float] = attrs.Factory(dict)  #: tokens of a row -> what these cost beside
    timed: dict[int, int] = attrs.Factory(dict)  #: tokens of a row -> timings
    first: dict[int, float] = attrs.Factory(dict)  #: tokens of a row -> the first timing, not believed yet

    def beside(self, size: int) -> float:
        """What a size costs beside: of one that was not timed, in proportion to its drafts."""
        points = sorted(({1: 0.0} | self.own).items())
        if len(points) == 1:
            return points[0][1]
        place = min(max(bisect.bisect_left(points, (size, -inf)), 1), len(points) - 1)
        (few, low), (many, high) = points[place - 1], points[place]
        if size > many:
            high = max(low, high)  # more drafts never cost less than those that were timed
        return low + (high - low) * (size - few) / (many - few)


class StepCosts:
    """Seconds of steps by rows and tokens of a row, kept up to date.

    A surprise at a size that is new is that size's own: drafting on the host, say. At one that is known it is
    the load's, for longer texts and a slower clock make all steps of that load slower. So sizes that were not
    run lately stay comparable with those that were.

    Where all sizes were measured before, drafting included, the first timing of a size is believed with the
    second, and of both the lesser: what a size costs when it comes up anew may hold a pause of the host, and
    a size that seems dear is not soon tried again.
    """

    def __init__(self, curve: CostCurve = FLAT) -> None:
        self.curve, self.with_drafting = curve, False
        self._loads: dict[int, _Load] = {}

    def replace(self, curve: CostCurve, *, drafting: bool = False) -> None:
        """Go by another curve; what was learned of corrections to the old one is forgotten.

        Args:
            drafting: it is of whole steps, drafting included.
        """
        self.curve, self.with_drafting = curve, drafting
        self._loads.clear()

    def seconds(self, rows: int, tokens: float) -> float:
        """Of a step of ``rows`` rows, with ``tokens`` tokens each on the average."""
        expected = self.curve.seconds(rows, tokens)
        load = self._loads.get(bucket(rows))
        if load is None:
            return expected
        return max(expected + load.common + load.beside(max(1, round(tokens))), LEAST)

    def observe(self, rows: int, tokens: float, seconds: float) -> None:
        """A step took ``seconds``."""
        size, load = max(1, round(tokens)), self._loads.setdefault(bucket(rows), _Load())
        count = load.timed.get(size, 0)
        load.timed[size] = count + 1
        if self.with_drafting:  # nothing is in a hurry: all sizes were measured before
            if not count:
                load.first[size] = seconds
                return
            count -= 1
            seconds = min(seconds, load.first.pop(size, seconds))
        expected = self.seconds(rows, tokens)
        surprise = seconds - expected
        if not load.own:
            load.common, load.own[size] = surprise, 0.0
            return
        share = 1.0 / (1 + count)
        if count >= NEW:
            share, surprise = OWN_SHARE, min(max(surprise, -MOST * expected), MOST * expected)
            load.common += COMMON_SHARE * surprise
        load.own[size] = load.beside(size) + share * surprise

    def widest(self, rows: int) -> int:
        """Most tokens a row of which about ``rows`` rows were timed; 0: nothing was."""
        load = self._loads.get(bucket(rows))
        return 0 if load is None else max(load.timed, default=0)

    def timed(self, rows: int, tokens: int) -> bool:
        """Whether a step of about ``rows`` rows was ever timed with so many tokens a row."""
        load = self._loads.get(bucket(rows))
        return load is not None and tokens in load.timed

    def known(self, rows: int, tokens: int) -> bool:
        """Whether it was timed as often as it takes for the timings to be believed."""
        load = self._loads.get(bucket(rows))
        return load is not None and load.timed.get(tokens, 0) >= (2 if self.with_drafting else 1)


class DraftCosts:
    """Seconds of drafting by rows and by the most drafts of a row, where it is timed apart from the step."""

    def __init__(self) -> None:
        self._points: dict[tuple[int, int], float] = {}
        self._curve: CostCurve | None = None

    def seconds(self, rows: int, width: int) -> float:
        """0 as long as none was timed: only trying tells."""
        return 0.0 if self._curve is None else self._curve.seconds(rows, 1 + width)

    def widest(self, rows: int) -> int:
        """Most drafts a row of which about ``rows`` rows were timed."""
        return max((tokens - 1 for at, tokens in self._points if at == bucket(rows)), default=0)

    def observe(self, rows: int, width: int, seconds: float) -> None:
        """Drafting at most ``width`` for each of ``rows`` rows took ``seconds``."""
        key = bucket(rows), 1 + width
        before = self._points.get(key, seconds)
        self._points[key] = max(before + DRAFT_SHARE * (seconds - before), 1e-9)
        self._curve = MeasuredCurve(self._points)
