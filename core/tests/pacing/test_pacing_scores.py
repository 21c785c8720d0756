"""Scores: what they stand for is learned, and drafts that are not worth their place are left out by them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from specdecode.engine.pacing import MeasuredCurve, Pacer, ScoreScale, Verified


def test_a_scale_learns_what_scores_stand_for():
    scale, known = ScoreScale(), np.full(2, 0.5)
    assert scale.gains(np.array([0.1, 0.9]), known).tolist() == [0.5, 0.5]  # nothing, so far
    for _ in range(200):  # upside down: low ones are accepted
        scale.observe([Verified(0, 2, 2, (0,), (0.15, 0.95)), Verified(1, 1, 1, (), ())])
    low, high = scale.gains(np.array([0.15, 0.95]), known)
    assert low > 0.9 and high < 0.1
    assert scale.gains(np.array([0.55, float("nan")]), known)[0] == 0.5


def pacer(cost):
    counted = Counter()
    curve = MeasuredCurve({(1, 1): 1.0, (1, 5): 1 + 4 * cost, (4, 1): 1.0, (4, 5): 1 + 16 * cost})
    made = Pacer(
        width=4,
        widths=(0, 1, 2, 3, 4),
        chain=True,
        lengths=lambda length, rows: None,
        reasons=lambda why: counted.update([why]),
    )
    made.target.replace(curve)
    for _ in range(100):  # a score is the chance that it says
        made.verified([Verified(row, 4, 4, (0, 1), (0.95, 0.85, 0.15, 0.05)) for row in range(2)])
    return made


def test_what_is_sure_is_kept_and_what_is_not_is_left_out():
    sure, unsure = (0.95, 0.95, 0.95, 0.95), (0.05, 0.05, 0.05)
    assert pacer(0.1).keep([0, 1, 2], [sure, unsure, ()]) == [4, 0, 0]
    assert pacer(0.1).keep([0, 1], [(0.95, 0.05, 0.95), ()]) == [1, 0]  # nothing behind what is left out
    assert pacer(0.0).keep([0, 1], [sure, unsure]) == [4, 3]  # where drafts cost nothing


def test_what_is_explored_is_not_left_out():
    made = pacer(0.1)
    made._tell([0], [3], "explore")
    assert made.keep([0], [(0.05, 0.05, 0.05)]) == [3]


@pytest.mark.parametrize("offered", [[], [()], [(), ()]])
def test_without_scores_all_is_kept(offered):
    assert pacer(0.1).keep(range(len(offered)), offered) == [0] * len(offered)
