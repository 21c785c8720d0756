"""The choice by gains and costs: what brute force finds, in bounds, and longer for what is accepted more."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specdecode.engine.pacing import MeasuredCurve, best_lengths, best_width, draft_widths

WIDTH = 5
rates = st.floats(0, 1)
costs = st.lists(st.floats(0, 1), min_size=WIDTH, max_size=WIDTH)


def chain(rate, width=WIDTH):
    return np.full(width, rate).cumprod()


def rising(steps, start=1.0):
    """Seconds by drafts, 0 to WIDTH."""
    return [start, *(start + np.cumsum(steps))]


@given(
    st.lists(rates, min_size=1, max_size=6), costs, st.lists(st.integers(0, WIDTH), min_size=6, max_size=6)
)
def test_one_width_is_the_fastest_of_all(row_rates, steps, limits):
    gains, limits = np.stack([chain(rate) for rate in row_rates]), limits[: len(row_rates)]
    seconds = rising(steps)
    widths = (0, 1, 2, 3, 5)
    choice = best_width(gains, limits, widths, lambda width: seconds[width])
    every = {
        width: sum(1 + row[: min(width, limit)].sum() for row, limit in zip(gains, limits, strict=True))
        / seconds[width]
        for width in widths
    }
    assert choice.width in widths
    assert choice.rate == pytest.approx(max(every.values()))
    assert list(choice.lengths) == [min(limit, choice.width) for limit in limits]


@given(
    st.lists(st.tuples(rates, st.integers(0, 3)), min_size=1, max_size=3),
    st.floats(0, 1),
    st.floats(0, 0.5),
    st.floats(0.3, 1),
)
@settings(max_examples=60, deadline=None)
def test_lengths_row_by_row_are_the_fastest_of_all(rows, a_token, a_level, share):
    """With costs straight in tokens and levels the greedy order finds what brute force does."""
    gains = np.stack([chain(rate, 3) for rate, _ in rows])
    limits = [limit for _, limit in rows]
    shares = np.full_like(gains, share)

    def target(tokens):
        return 1 + a_token * (tokens - 1)

    def drafting(width):
        return a_level * width

    choice = best_lengths(gains, shares, limits, (0, 1, 2, 3), target, drafting)
    assert all(0 <= length <= limit for length, limit in zip(choice.lengths, limits, strict=True))
    best = max(
        (len(rows) + share * sum(row[:own].sum() for row, own in zip(gains, lengths, strict=True)))
        / (target(1 + share * sum(lengths) / len(rows)) + drafting(max(lengths)))
        for lengths in itertools.product(*(range(limit + 1) for limit in limits))
    )
    assert choice.rate == pytest.approx(best)


@given(rates, rates, costs)
def test_more_acceptance_never_makes_drafts_shorter(one, other, steps):
    low, high = sorted((one, other))
    seconds = rising(steps)
    lengths = [
        best_width(chain(rate)[None], [WIDTH], range(WIDTH + 1), lambda width: seconds[width]).width
        for rate in (low, high)
    ]
    assert lengths[0] <= lengths[1]


@given(costs)
def test_nothing_is_drafted_that_is_never_accepted(steps):
    seconds, nothing = rising(steps), np.zeros((2, WIDTH))
    assert best_width(nothing, [WIDTH] * 2, range(WIDTH + 1), lambda width: seconds[width]).width == 0
    limits = [WIDTH] * 2
    choice = best_lengths(nothing, nothing + 1, limits, (0, 1, 5), lambda tokens: tokens, lambda width: width)
    assert choice.lengths == (0, 0)


def test_a_row_that_is_accepted_gets_what_another_gives_up():
    gains = np.stack([chain(0.9), chain(0.1)])
    choice = best_lengths(
        gains, np.ones_like(gains), [WIDTH] * 2, range(WIDTH + 1), lambda tokens: 1 + 0.4 * (tokens - 1),
        lambda width: 0.0,
    )  # fmt: skip
    assert choice.lengths[0] >= 3 and choice.lengths[1] == 0


@given(st.integers(1, 1024))
def test_widths_worth_telling_apart(width):
    widths = draft_widths(width)
    assert widths[0] == 0 and widths[-1] == width and list(widths) == sorted(set(widths))
    assert len(widths) <= 24
    assert all(high <= 2 * low or high - low <= 1 for low, high in itertools.pairwise(widths) if low)


# -- curves -----------------------------------------------------------------------------------------
ROWS, TOKENS = (1, 8, 32), (1, 2, 4, 8)


@given(
    st.lists(st.floats(0.1, 10), min_size=12, max_size=12), st.integers(1, 31), st.integers(1, 7), st.data()
)
def test_a_curve_never_falls(seconds, rows, tokens, data):
    curve = MeasuredCurve(dict(zip(itertools.product(ROWS, TOKENS), seconds, strict=True)))
    more_rows, more_tokens = data.draw(st.integers(rows, 32)), data.draw(st.integers(tokens, 8))
    assert 0.1 <= curve.seconds(rows, tokens) <= curve.seconds(more_rows, more_tokens) + 1e-9
    assert curve.seconds(64, 16) >= curve.seconds(32, 8) - 1e-9


@given(
    st.dictionaries(st.tuples(st.sampled_from(ROWS), st.sampled_from(TOKENS)), st.floats(0.1, 10), min_size=1)
)
def test_a_curve_of_whatever_was_measured_is_above_nothing(measured):
    curve = MeasuredCurve(measured)
    assert all(curve.seconds(rows, tokens) > 0 for rows in (1, 3, 8, 100) for tokens in (1, 1.5, 8, 20))


def test_a_curve_goes_through_its_points_and_between_them():
    curve = MeasuredCurve({(1, 1): 5.0, (1, 5): 6.0, (8, 1): 6.0, (8, 5): 9.0})
    assert curve.seconds(1, 1) == 5 and curve.seconds(8, 5) == 9
    assert curve.seconds(1, 3) == pytest.approx(5.5) and curve.seconds(8, 9) == pytest.approx(12)
    assert curve.seconds(4.5, 1) == pytest.approx(5.5)
    assert MeasuredCurve({(2, 1): 4.0, (2, 4): 8.0}).seconds(4, 2) == 8  # by its tokens in all
    assert curve.best(1, [0.9, 0.8, 0.7, 0.6]) == 4 and curve.best(8, [0.05, 0.05]) == 0


@pytest.mark.parametrize("measured", [{}, {(0, 1): 1.0}, {(1, 1): 0.0}, {(1, 1): float("nan")}])
def test_no_curve_without_points(measured):
    with pytest.raises(ValueError, match="points want rows and tokens of at least 1"):
        MeasuredCurve(measured)
