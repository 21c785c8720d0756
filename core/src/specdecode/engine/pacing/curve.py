"""What a step costs by its size: between what was measured, and beyond."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence


class MeasuredCurve:
    """Implements :class:`~specdecode.contract.CostCurve` on measured points.

    Linear between measured points and behind the last of them, and between two of them more rows or tokens
    never cost less. Where one number of rows was measured, a step costs what its tokens in all cost there.
    """

    def __init__(self, points: Mapping[tuple[int, int], float]) -> None:
        """``points``: ``(rows, tokens) -> seconds``, at least one.

        Raises:
            ValueError: there is none, or one that no step can have.
        """
        if not points or any(r < 1 or t < 1 or not s > 0 for (r, t), s in points.items()):
            raise ValueError(f"points want rows and tokens of at least 1 and seconds above 0, got {points!r}")
        self._points = dict(points)
        by_rows: dict[int, dict[int, float]] = {}
        for (rows, tokens), seconds in points.items():
            by_rows.setdefault(rows, {})[tokens] = seconds
        self._rows = sorted(by_rows)
        self._lines: list[_Line] = []
        for rows in self._rows:  # noise must not make more rows cost less
            fewer = self._lines[-1] if self._lines else None
            line = [(t, s if fewer is None else max(s, fewer(t))) for t, s in sorted(by_rows[rows].items())]
            self._lines.append(_Line(line))

    @property
    def points(self) -> Mapping[tuple[int, int], float]:
        """``(rows, tokens) -> seconds``, as measured."""
        return self._points

    def seconds(self, rows: float, tokens: float) -> float:
        if len(self._rows) == 1:  # nothing tells what a row costs beside its tokens
            return self._lines[0](tokens * rows / self._rows[0])
        high = min(max(bisect.bisect_left(self._rows, rows), 1), len(self._rows) - 1)
        few, many = self._rows[high - 1], self._rows[high]
        below = self._lines[high - 1](tokens)
        above = max(below, self._lines[high](tokens))
        linear = below + (above - below) * (rows - few) / (many - few)
        return linear if rows >= few else max(linear, below * rows / few)

    def best(self, rows: float, gains: Sequence[float]) -> int:
        best, most, expected = 0, 1.0 / self.seconds(rows, 1), 1.0
        for count, gain in enumerate(gains, 1):
            expected += gain
            if (rate := expected / self.seconds(rows, 1 + count)) > most:
                best, most = count, rate
        return best

    def __repr__(self) -> str:
        return f"MeasuredCurve({self._points!r})"


class _Line:
    """Seconds by tokens at one number of rows: linear between points, rising, of one slope behind them."""

    def __init__(self, points: Iterable[tuple[int, float]]) -> None:
        rising: list[tuple[int, float]] = []
        for tokens, seconds in points:
            rising.append((tokens, max(seconds, rising[-1][1]) if rising else seconds))
        self._points = rising
        (first, start), (last, end) = rising[0], rising[-1]
        # The whole line's slope, not that of its last two points, which noise may have bent.
        self._slope = (end - start) / (last - first) if last > first else 0.0

    def __call__(self, tokens: float) -> float:
        (first, start), (last, end) = self._points[0], self._points[-1]
        if tokens <= first:
            return max(start - self._slope * (first - tokens), start * tokens / first)
        if tokens >= last:
            return end + self._slope * (tokens - last)
        place = bisect.bisect_left(self._points, tokens, key=lambda point: point[0])
        (left, low), (right, high) = self._points[place - 1], self._points[place]
        return low + (high - low) * (tokens - left) / (right - left)
