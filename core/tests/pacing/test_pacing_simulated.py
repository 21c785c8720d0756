"""The pacer on simulated engines: near the best fixed length at every load, and never much below plain.

Costs are those of an 8B target on an H100, about; timings and verifications come one step late, as from the
overlapped loop.
"""

from __future__ import annotations

from collections import Counter

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specdecode.engine.pacing import REASONS, MeasuredCurve, Pacer, Verified

WIDTHS = (0, 1, 2, 3, 5, 7)
WIDTH = WIDTHS[-1]
BATCHES = (1, 8, 32, 128)
#: The engine is slower than its parts timed alone, by so much.
LOOP = 1.06


def card(rows, width):
    """Seconds of a step: weights and texts, products beyond what the weights' stream hides, drafting."""
    products, drafting = 0.022 * max(0, rows * (1 + width) - 64), (0.1 + 0.3 * width) * (width > 0)
    return (5.0 + 0.03 * rows + products + drafting) / 1e3


def seeds():
    return MeasuredCurve({(rows, 1 + width): card(rows, width) for rows in BATCHES for width in WIDTHS})


@attrs.define(slots=False)
class Engine:
    """A batch that decodes, whose drafts are accepted at a rate."""

    rows: int
    seconds: object = card
    curve: object = attrs.Factory(seeds)
    whole: bool = True
    seed: int = 0

    def __attrs_post_init__(self):
        self.lengths, self.reasons = Counter(), Counter()
        self.pacer = Pacer(
            width=WIDTH,
            widths=WIDTHS,
            chain=True,
            lengths=lambda length, count: self.lengths.update({length: count}),
            reasons=lambda why: self.reasons.update([why]),
        )
        for costs in (self.pacer.whole, self.pacer.target):
            costs.replace(self.curve, drafting=self.whole)
        self.rng = np.random.default_rng(self.seed)
        self.last, self.flying = 0, None

    def run(self, rate, steps, limits=None):
        """Tokens a second."""
        rows, tokens, time = range(self.rows), 0, 0.0
        for _ in range(steps):
            width = self.pacer.alike(rows, limits or [WIDTH] * self.rows, WIDTHS)
            assert width in WIDTHS
            drafted = min(self.last, width)  # what was made before
            accepted = (self.rng.random((self.rows, WIDTH)) < rate)[:, :drafted].cumprod(1).sum(1)
            took = LOOP * self.seconds(self.rows, width)
            tokens, time = tokens + self.rows + accepted.sum(), time + took
            if self.flying is not None:
                before, made, kept, seconds = self.flying
                self.pacer.whole.observe(self.rows, 1 + before, seconds)
                self.pacer.verified(
                    [Verified(row, made, made, range(n)) for row, n in zip(rows, kept, strict=True)]
                )
            self.flying, self.last = (width, drafted, accepted, took), width
        return tokens / time

    def fixed(self, rate, width):
        expected = 1 + sum(rate ** (place + 1) for place in range(width))
        return self.rows * expected / (LOOP * self.seconds(self.rows, width))


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("rows", BATCHES)
def test_near_the_best_fixed_length_and_never_below_plain(rows, rate):
    engine = Engine(rows)
    speed = engine.run(rate, 600)
    best = max(engine.fixed(rate, width) for width in WIDTHS)
    assert speed >= 0.95 * best
    assert speed >= 0.97 * engine.fixed(rate, 0)
    assert set(engine.reasons) <= set(REASONS) and sum(engine.reasons.values()) == 600
    assert sum(engine.lengths.values()) == 600 * rows


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.8])
def test_128_rows_as_an_h200_has_them(rate):
    """Milliseconds of the 8B shape with an EAGLE-3 head: alone at start-up, then in the loop."""
    alone = {0: 6.06, 1: 8.05, 2: 14.14, 3: 15.54, 5: 24.52, 7: 33.5}
    loop = {0: 7.65, 1: 10.40, 2: 16.36, 3: 18.6, 5: 27.8, 7: 37.0}
    curve = MeasuredCurve({(128, 1 + width): ms / 1e3 for width, ms in alone.items()})
    engine = Engine(128, lambda rows, width: loop[width] / 1e3, curve)
    speed = engine.run(rate, 300)
    assert speed >= 0.95 * max(engine.fixed(rate, width) for width in WIDTHS)
    assert speed >= 0.97 * engine.fixed(rate, 0)


@pytest.mark.parametrize("a_level", [2.0, 20.0])
@pytest.mark.parametrize("rows", BATCHES)
def test_drafting_that_nobody_measured_is_found_out_cheaply(rows, a_level):
    """The curve knows the target alone; drafting a level takes two fifths, or four times, of a plain step."""

    def slow(rows, width):
        return (5 + 0.03 * rows * (1 + width) + a_level * width) / 1e3

    curve = MeasuredCurve({(n, 1 + w): (5 + 0.03 * n * (1 + w)) / 1e3 for n in BATCHES for w in WIDTHS})
    engine = Engine(rows, slow, curve, whole=False)
    speed = engine.run(0.3, 600)
    assert speed >= 0.97 * engine.fixed(0.3, 0)
    assert engine.pacer.width in (0, 1)


@pytest.mark.parametrize("rows", [1, 32])
def test_it_goes_with_the_text(rows):
    engine = Engine(rows)
    engine.run(0.02, 400)
    assert engine.reasons["no_gain"] > 250
    engine.run(0.9, 1500 if rows == 1 else 400)  # one row has one probe a time
    assert engine.pacer.width >= 3
    assert engine.run(0.9, 200) >= 0.9 * max(engine.fixed(0.9, width) for width in WIDTHS)
    engine.run(0.02, 200)
    assert engine.run(0.02, 200) >= 0.95 * engine.fixed(0.02, 0)


@pytest.mark.parametrize("rows", BATCHES)
def test_exploring_costs_little_and_never_ends(rows):
    engine = Engine(rows)
    plain = engine.fixed(0.0, 0)
    engine.run(0.0, 200)
    before = engine.reasons["explore"]
    assert engine.run(0.0, 1000) >= 0.985 * plain
    assert engine.reasons["explore"] > before


def test_limits_are_kept_and_where_nothing_may_be_drafted_nothing_is_explored():
    engine = Engine(4)
    engine.run(0.9, 100, limits=[2, 0, 7, 1])
    assert [engine.pacer.length(row) <= limit for row, limit in enumerate([2, 0, 7, 1])] == [True] * 4
    assert engine.pacer.length(2) >= 3
    counted = dict(engine.reasons)
    engine.run(0.9, 100, limits=[0] * 4)
    assert dict(engine.reasons) == counted and engine.pacer.width == 0


@given(st.lists(st.floats(0, 1), min_size=1, max_size=5), st.integers(0, 3), st.floats(0.0, 0.3))
@settings(max_examples=25, deadline=None)
def test_row_by_row_it_stays_in_bounds_whatever_happens(rates, limit, a_level):
    """Random rows with lengths of their own, as in the plain order."""
    pacer, rng = Engine(1).pacer, np.random.default_rng(7)
    pacer.target.replace(MeasuredCurve({(1, 1): 1.0, (1, 8): 2.0, (8, 1): 1.2, (8, 8): 4.0}))
    rows = range(len(rates))
    limits = [limit if row == 0 else WIDTH for row in rows]
    for _ in range(40):
        lengths = [pacer.length(row) for row in rows]
        pacer.target.observe(len(rates), 1 + sum(lengths) / len(rates), 1 + 0.1 * sum(lengths))
        pacer.each(rows, limits)
        assert all(0 <= pacer.length(row) <= most for row, most in zip(rows, limits, strict=True))
        pacer.drafting.observe(len(rates), max(pacer.length(row) for row in rows), a_level)
        pacer.verified(
            [
                Verified(row, n, n, range(int((rng.random(n) < rate).cumprod().sum())))
                for row, rate in enumerate(rates)
                if (n := pacer.length(row))
            ]
        )
    assert pacer.speedup >= 1 - 1e-9


def test_rows_that_are_accepted_draft_and_the_others_do_not():
    pacer = Engine(1).pacer
    pacer.target.replace(MeasuredCurve({(1, 1): 1.0, (1, 8): 1.8, (8, 1): 2.0, (8, 8): 7.6}))
    rows, rng = range(4), np.random.default_rng(3)
    for _ in range(200):
        lengths = [pacer.length(row) for row in rows]
        pacer.target.observe(4, 1 + sum(lengths) / 4, 1.4 + 0.12 * sum(lengths))
        pacer.verified(
            [
                Verified(row, n, n, range(int((rng.random(n) < (0.95 if row < 2 else 0.02)).cumprod().sum())))
                for row, n in enumerate(lengths)
            ]
        )
        pacer.each(rows, [WIDTH] * 4)
        pacer.drafting.observe(4, max(lengths), 0.01)
    assert min(pacer.length(0), pacer.length(1)) >= 3 > 1 >= max(pacer.length(2), pacer.length(3))
    pacer.forget(0)
    assert 0 not in pacer._lengths
