"""Where no draft pays the proposer rests, and it is back where one does: on a simulated engine.

Costs are those of an 8B target with an EAGLE-3 head on an H200, 128 rows, by and large; timings and
verifications come one step late, as from the overlapped loop.
"""

from __future__ import annotations

from collections import Counter

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specdecode.engine.pacing import REASONS, Gaps, MeasuredCurve, Pacer, Verified
from specdecode.engine.pacing.resting import STREAK, best_waking

WIDTHS = (0, 1, 2, 3, 5)
ROWS = 128
#: Milliseconds of a step by its width, the head fed; of a plain one without it; of a token computed again.
FED, UNFED, AGAIN = {0: 7.35, 1: 10.17, 2: 14.0, 3: 16.5, 5: 28.0}, 7.13, 0.03


def card(rows, width):
    """Seconds of a step of ``rows`` rows; width None: the head is not fed."""
    light, full = (4.6, UNFED) if width is None else (4.8 + 0.35 * width, FED[width])
    return (light + (full - light) * rows / ROWS) / 1e3


def curve():
    return MeasuredCurve({(n, 1 + w): card(n, w) for n in (1, 2, 4, 8, 16, 32, 64, 128) for w in WIDTHS})


@attrs.define(eq=False)
class Row:
    """A request: how its drafts are accepted, what it may still be given, and how far it is behind."""

    rate: float
    left: int = 10**6
    behind: int = 0


@attrs.define(slots=False)
class Engine:
    """Rows that decode; those that end are gone, or make room for new ones."""

    rows: list
    keeps: bool = True  #: entries of rows that were not fed are missing
    measured: bool = True
    noise: float = 0.01
    seed: int = 0

    def __attrs_post_init__(self):
        self.lengths, self.reasons = Counter(), Counter()
        self.pacer = Pacer(
            width=WIDTHS[-1],
            widths=WIDTHS,
            chain=True,
            lengths=lambda length, count: self.lengths.update({length: count}),
            reasons=lambda why: self.reasons.update([why]),
        )
        self.pacer.whole.replace(curve(), drafting=True)
        if self.measured:
            self.pacer.know_rest({n: card(n, None) / card(n, 0) for n in (1, 8, 32, 64, 128)})
        self.rng = np.random.default_rng(self.seed)
        self.drafted, self.flying, self.time, self.tokens = {}, [], 0.0, 0
        self.caught_up = self.woken = 0

    def step(self):
        pacer, rows = self.pacer, self.rows
        gaps = Gaps([row.behind for row in rows], [row.left for row in rows])
        width = pacer.alike(rows, [WIDTHS[-1]] * len(rows), WIDTHS, gaps=gaps)
        if pacer.waking:
            self.woken += 1
            took = card(len(rows), None) + AGAIN / 1e3 * sum(row.behind for row in pacer.waking)
            took += card(len(rows), None)  # all that was under way is waited for
            self.caught_up += sum(row.behind for row in pacer.waking)
            for row in pacer.waking:
                row.behind = 0
            self.drafted = {}
            self.give([(row, 0, 0) for row in rows], took, True)
            return
        fed = pacer.feeds
        took = card(len(rows), width if fed else None) * (1 + self.noise * self.rng.standard_normal())
        step = []
        for row in rows:
            offered = min(width, self.drafted.get(row, 0))
            kept = int((self.rng.random(offered) < row.rate).cumprod().sum()) if offered else 0
            step.append((row, offered, kept))
        self.drafted = {row: width for row in rows if fed and not row.behind}
        self.flying.append((len(rows), width, fed, took, step))
        self.give(step, took, fed)
        if len(self.flying) > 1:
            count, width, fed, took, step = self.flying.pop(0)
            if fed:
                pacer.whole.observe(count, 1 + width, took)
            else:
                pacer.rested(count, took)
            pacer.verified([Verified(row, n, n, range(kept)) for row, n, kept in step])

    def give(self, step, took, fed):
        self.time += took
        for row, _, kept in step:
            self.tokens += 1 + kept
            row.left -= 1 + kept
            row.behind += (1 + kept) * (self.keeps and (bool(row.behind) or not fed))
        for row in [row for row in self.rows if row.left <= 0]:
            self.rows.remove(row)
            self.pacer.forget(row)

    def run(self, steps):
        """Tokens a second."""
        tokens, time = self.tokens, self.time
        for _ in range(steps):
            if self.rows:
                self.step()
        return (self.tokens - tokens) / (self.time - time)


def fixed(rate, width, rows=ROWS):
    """Tokens a second; width None: without a proposer."""
    return rows * sum(rate**place for place in range(1 + (width or 0))) / card(rows, width)


def rows(rate, count=ROWS, left=10**6):
    return [Row(rate, left) for _ in range(count)]


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_where_no_draft_pays_it_is_as_good_as_plain(seed, measured, keeps):
    engine = Engine(rows(0.3), keeps, measured, seed=seed)
    assert engine.run(400) >= 0.975 * fixed(0.3, None)
    assert engine.pacer.resting and engine.reasons["rest"] > 300
    assert set(engine.reasons) <= set(REASONS) and sum(engine.reasons.values()) == 400
    assert engine.run(1500) >= 0.98 * fixed(0.3, None)


@pytest.mark.parametrize("seed", range(3))
def test_where_drafts_pay_it_never_rests(seed):
    engine = Engine(rows(0.6), seed=seed)
    speed = engine.run(400)
    assert speed >= 0.96 * max(fixed(0.6, width) for width in (None, *WIDTHS))
    assert engine.pacer.width == 1 and not engine.reasons["rest"]


def replace(engine, rate, count, left):
    """The oldest requests end, and as many others come."""
    for row in engine.rows[:count]:
        engine.pacer.forget(row)
    engine.rows[:] = [*engine.rows[count:], *rows(rate, count, left)]


@pytest.mark.parametrize("keeps", [True, False])
def test_new_requests_are_asked_whether_drafts_pay_now(keeps):
    """Eight in 16 steps are new; from some time on those whose drafts are accepted."""
    engine = Engine(rows(0.3), keeps)
    for _ in range(30):
        engine.run(16)
        replace(engine, 0.3, 8, 400)
    assert engine.pacer.resting and engine.reasons["explore"] > 4
    for _ in range(50):
        engine.run(16)
        replace(engine, 0.9, 8, 10**6)
    assert not engine.pacer.resting and engine.pacer.width >= 1
    speed = engine.run(200)
    assert speed >= 0.9 * max(fixed(0.9, width) for width in WIDTHS)


@pytest.mark.parametrize("count", [1, 128])
def test_texts_that_change_are_noticed_without_anybody_new(count):
    engine = Engine(rows(0.02, count))
    engine.run(300)
    assert engine.pacer.resting
    for row in engine.rows:
        row.rate = 0.95
    engine.run(3000)
    if count == 1:
        assert not engine.pacer.resting and engine.pacer.width >= 1
    assert engine.reasons["explore"] > 8  # of many that are far behind few can be asked


def test_fewer_rows_wake_it_and_those_worth_it_catch_up():
    engine = Engine([*rows(0.5, 120, 120), *rows(0.5, 8, 10**4)])
    engine.pacer.whole.replace(  # here drafts pay with few rows alone
        MeasuredCurve(
            {(n, 1 + w): card(n, w) * (1 + 0.3 * w * n / ROWS) for n in (1, 8, 64, 128) for w in WIDTHS}
        ),
        drafting=True,
    )
    engine.run(100)
    assert engine.pacer.resting and not engine.woken
    engine.run(400)
    assert len(engine.rows) == 8 and engine.woken and not engine.pacer.resting
    assert not any(row.behind for row in engine.rows) and engine.caught_up <= 8 * 130
    assert engine.pacer.width >= 1


def test_rows_that_end_soon_do_not_catch_up():
    gains = np.full((4, 5), 0.8).cumprod(1)
    gaps = Gaps([400, 400, 30, 0], [2000, 3, 2000, 2000])

    def waking(again, rate=4 / 0.005):
        return best_waking(
            gains, [5] * 4, WIDTHS, gaps, seconds=lambda width: 0.005 + 0.0004 * width, again=again, rate=rate
        )

    assert waking(3e-5).rows == (0, 2) and waking(3e-5).width == 5
    assert waking(3e-3).rows == (2,)
    assert waking(1.0) is None
    assert waking(3e-5, rate=1e4) is None


def test_measurements_that_hold_a_width_are_fed():
    engine = Engine(rows(0.1, 8))
    engine.run(200)
    assert engine.pacer.resting and not engine.pacer.feeds
    engine.pacer.held = 2
    engine.step()
    assert engine.pacer.feeds and engine.pacer.width == 2 and not engine.pacer.resting
    engine.pacer.held = None
    engine.pacer.forget_all()
    engine.run(STREAK)
    assert not engine.reasons["rest"] or not engine.pacer.resting or engine.pacer.feeds is False


def test_who_cannot_rest_is_fed_in_every_step():
    engine = Engine(rows(0.1, 8))
    for _ in range(200):
        engine.pacer.alike(engine.rows, [5] * 8, WIDTHS)
        assert engine.pacer.feeds and not engine.pacer.resting and not engine.pacer.waking
        engine.pacer.verified([Verified(row, n := engine.pacer.length(row), n, ()) for row in engine.rows])
    assert not engine.reasons["rest"] and engine.reasons["no_gain"]


@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(1, 400)), min_size=1, max_size=6),
    st.integers(0, 10**6),
    st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_whatever_happens_rows_that_are_behind_do_not_draft(asks, seed, keeps):
    engine = Engine([Row(rate, left) for rate, left in asks], keeps, seed=seed)
    for _ in range(120):
        if not engine.rows:
            break
        engine.step()
        pacer = engine.pacer
        assert pacer.feeds or pacer.width == 0
        assert set(pacer.waking) <= set(asks_of(engine))
        if seed % 3 == 0 and pacer.resting:
            engine.rows.append(Row(float(engine.rng.random()), 50))


def asks_of(engine):
    """Who woke may have ended in that step."""
    return {*engine.rows, *(row for row in engine.pacer.waking if row.left <= 0)}
