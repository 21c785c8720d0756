"""Which arm pays: tokens a row and a step by namespace, seconds a step by load. Torch-free.

An *arm* is one of the methods, or none of them. A step's arm is chosen for all its rows, since what a step
costs is not to be divided among them.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import attrs

#: Namespaces that are remembered; the one that was seen least recently is forgotten first.
MOST_NAMESPACES = 1024
#: Steps behind a change of arm that are not judged: the drafts of the arm before are still under way.
SETTLING = 4
#: Judged steps of an arm before it may be chosen for what it gave.
ENOUGH = 4
#: How much of an average each new value changes: the last 50 or so count.
_SHARE = 0.02
#: One step that takes longer than so many of its kind (another program, a compilation) says nothing of its
#: arm.
_OUTLIER = 4.0


@attrs.define
class _Average:
    """Of all values while they are few, then of the latest."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += (value - self.value) * max(1.0 / self.count, _SHARE)


class Learner:
    """A bandit over arms ``0..count-1``, and ``count``: no drafts, which gives one token a row.

    An arm that was not seen often enough in this namespace, or at this load, is tried first. Then the arm
    with the most tokens a second is chosen, but for ``exploration`` of the steps, in which the others are
    tried again, the one that was chosen least recently first. A choice stands for ``trial_steps`` steps.

    Args:
        count: arms beside that of no drafts.
        trial_steps: more than ``SETTLING``.
        exploration: share of the steps, 0 to 0.5; 0: what was learnt stays.
    """

    def __init__(self, count: int, *, trial_steps: int, exploration: float) -> None:
        self.plain = count
        self.arm = 0
        self.steps = [0] * (count + 1)  #: how many each arm was chosen for
        self._trial = trial_steps
        self._exploration = exploration
        self._age = 0  # steps that the present choice has stood for
        self._clock = 0
        self._explored = 0
        self._chosen_at = [-1] * (count + 1)
        self._tokens: OrderedDict[str, list[_Average]] = OrderedDict()
        self._seconds: dict[int, list[_Average]] = {}
        self._pooled = [_Average() for _ in range(count + 1)]  # for metrics alone

    # -- choosing -------------------------------------------------------------------------------
    def choose(self, rows: Mapping[str, int]) -> int:
        """The arm of the next step.

        Args:
            rows: namespace -> how many of its rows are to be drafted for; at least one.
        """
        if not self._clock or self._age >= self._trial:
            self.arm = self._next(rows)
            self._age = 0
        self._age += 1
        self._clock += 1
        self.steps[self.arm] += 1
        self._chosen_at[self.arm] = self._clock
        return self.arm

    def _next(self, rows: Mapping[str, int]) -> int:
        seconds = self._seconds_at(sum(rows.values()))
        most = max(rows, key=lambda namespace: rows[namespace])
        for arm in range(self.plain + 1):
            untold = arm != self.plain and self._of(most)[arm].count < ENOUGH
            if untold or seconds[arm].count < ENOUGH:
                return arm
        rates = [
            sum(count * self._tokens_of(namespace, arm) for namespace, count in rows.items())
            / seconds[arm].value
            for arm in range(self.plain + 1)
        ]
        best = max(range(len(rates)), key=lambda arm: rates[arm])
        others = [arm for arm in range(len(rates)) if arm != best]
        if (self._explored + 1) * self._trial <= self._exploration * self._clock:
            self._explored += 1
            return min(others, key=lambda arm: self._chosen_at[arm])
        return best

    def _tokens_of(self, namespace: str, arm: int) -> float:
        if arm == self.plain:
            return 1.0
        own = self._of(namespace)[arm]
        return own.value if own.count else 1.0

    # -- learning -------------------------------------------------------------------------------
    @property
    def settled(self) -> bool:
        """Whether what comes back from the target is of the present arm."""
        return self._age > SETTLING

    def committed(self, namespace: str, tokens: int) -> None:
        """A row of ``namespace`` was verified with the drafts of the present arm and got ``tokens``."""
        if self.settled:
            self._of(namespace)[self.arm].add(tokens)
            self._pooled[self.arm].add(tokens)

    def took(self, rows: int, seconds: float) -> None:
        """A step of ``rows`` rows with the present arm took so long."""
        average = self._seconds_at(rows)[self.arm]
        if self.settled and not (average.count >= ENOUGH and seconds > _OUTLIER * average.value):
            average.add(seconds)

    def _of(self, namespace: str) -> list[_Average]:
        found = self._tokens.get(namespace)
        if found is None:
            found = self._tokens[namespace] = [_Average() for _ in range(self.plain + 1)]
            if len(self._tokens) > MOST_NAMESPACES:
                self._tokens.popitem(last=False)
        else:
            self._tokens.move_to_end(namespace)
        return found

    def _seconds_at(self, rows: int) -> list[_Average]:
        """By load: 1, 2, 3 to 4, 5 to 8, ... rows."""
        load = max(rows - 1, 0).bit_length()
        return self._seconds.setdefault(load, [_Average() for _ in range(self.plain + 1)])

    # -- telling --------------------------------------------------------------------------------
    def rates(self) -> Sequence[float]:
        """Of each arm tokens a row and a second, at the load it was seen at most; 0: not seen yet."""
        found = []
        for arm in range(self.plain + 1):
            seen = max((averages[arm] for averages in self._seconds.values()), key=_seen, default=_Average())
            tokens = 1.0 if arm == self.plain else self._pooled[arm].value
            found.append(tokens / seen.value if seen.value else 0.0)
        return found

    @property
    def namespaces(self) -> int:
        """How many are remembered."""
        return len(self._tokens)


def _seen(average: _Average) -> float:
    return average.count if math.isfinite(average.value) else 0
