"""Who waits for others to come in with them, and for how long."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specdecode.engine.admission import Admission

STEP, PAUSE, LONGEST = 0.006, 0.008, 0.05


class Line:
    """Requests come at random to rows that decode in steps of :data:`STEP` and pause to let them in."""

    def __init__(self, rate: float, rows: int, longest: float = LONGEST, seed: int = 0) -> None:
        self.admission = Admission(longest)
        self.rows, self.rate, self.dice = rows, rate, random.Random(seed)
        self.now = 0.0
        self.coming = self.dice.expovariate(rate)
        self.waiting: list[float] = []
        self.delays: list[float] = []
        self.steps = self.pauses = 0

    def run(self, seconds: float) -> Line:
        end = self.now + seconds
        while self.now < end:
            while self.coming <= self.now:
                self.waiting.append(self.coming)
                self.coming += self.dice.expovariate(self.rate)
            alone = True
            waiting = len(self.waiting)
            if waiting and not self.admission.puts_off(self.now, waiting=waiting, rows=self.rows):
                self.admission.let_in(self.now, waiting)
                self.delays += [self.now - came for came in self.waiting]
                self.waiting.clear()
                self.now += PAUSE + 0.0005 * waiting
                self.pauses += 1
                alone = False
            self.admission.launched(self.now, alone=alone)
            self.now += STEP
            self.steps += 1
        return self


def test_where_many_come_they_come_in_together_and_rows_pause_less():
    """48 a second beside 64 rows: more than half of the time would be pauses."""
    hurried, patient = Line(48, 64, longest=0).run(20), Line(48, 64).run(20)
    assert hurried.pauses > 1.8 * patient.pauses
    assert patient.steps > 1.15 * hurried.steps
    assert max(patient.delays) < LONGEST + PAUSE + 2 * STEP + 0.01
    assert patient.admission.pause == pytest.approx(PAUSE, abs=0.001)


@pytest.mark.parametrize(("rate", "rows"), [(4, 3), (12, 6), (1, 64)])
def test_who_comes_seldom_is_let_in_at_once(rate, rows):
    line = Line(rate, rows).run(30)
    others = Line(rate, rows, longest=0).run(30)
    assert sum(line.delays) / len(line.delays) < 1.1 * sum(others.delays) / len(others.delays)


@given(
    rate=st.floats(0.5, 400), rows=st.integers(1, 256), longest=st.floats(0, 0.2), seed=st.integers(0, 1000)
)
def test_nobody_waits_longer_than_they_may(rate, rows, longest, seed):
    line = Line(rate, rows, longest, seed).run(2)
    pause = PAUSE + 0.0005 * max(1, rate * (longest + 1))
    assert all(delay <= longest + pause + 2 * STEP for delay in line.delays)


def test_nobody_waits_before_it_is_known_what_coming_in_costs_nor_beside_nobody():
    admission = Admission(LONGEST)
    assert not admission.puts_off(0.0, waiting=1, rows=64)
    line = Line(48, 64).run(5)
    assert not line.admission.puts_off(line.now, waiting=1, rows=0)
    assert not line.admission.puts_off(line.now, waiting=0, rows=64)


def test_a_launch_behind_an_idle_spell_is_no_pause():
    admission = Line(48, 64).run(5).admission
    known = admission.pause
    admission.stood_up()
    for _ in range(40):
        admission.let_in(1000.0, 1)
        admission.launched(1010.0, alone=False)
        admission.stood_up()
    assert admission.pause == known


def test_whom_no_block_is_left_for_is_not_counted_as_let_in():
    line = Line(48, 64).run(5)
    assert line.admission.puts_off(line.now, waiting=1, rows=64)
    line.admission.let_in(line.now + 10.0, 0)
    assert line.admission.puts_off(line.now + 10.0, waiting=1, rows=64)
