"""What is learned of acceptance and of costs: from few observations little, and nothing of a hiccup."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from specdecode.engine.pacing import Acceptance, DraftCosts, MeasuredCurve, StepCosts, Verified


def draw(rng, rate, drafted):
    return int((rng.random(drafted) < rate).cumprod().sum())


def chain(row, accepted, drafted=4, offered=None):
    return Verified(row, drafted if offered is None else offered, drafted, range(accepted))


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.8, 1.0])
def test_a_chain_is_known_by_its_places(rate):
    seen, rng = Acceptance(4, chain=True), np.random.default_rng(1)
    for _ in range(300):
        seen.observe([chain(row, draw(rng, rate, 4)) for row in range(8)])
    (gains,) = seen.gains([0])
    assert gains[:2] == pytest.approx([rate, rate**2], abs=0.15)
    assert all(a >= b for a, b in itertools.pairwise(gains))
    (stranger,) = seen.gains(["new"])  # goes by what is known of all
    assert stranger[0] == pytest.approx(rate, abs=0.07)


def test_a_row_of_its_own_parts_from_the_others_with_its_trials():
    seen = Acceptance(4, chain=True)
    for _ in range(60):
        seen.observe([chain(row, 0) for row in range(7)])
    first = seen.gains(["good"])[0][0]
    for trials in range(1, 30):
        seen.observe([chain("good", 4)])
        if trials == 1:
            assert seen.gains(["good"])[0][0] < 0.4  # one is little
    assert first < 0.1 and seen.gains(["good"])[0][0] > 0.75
    assert seen.gains([0])[0][0] < 0.2


def test_places_that_were_never_tried_go_by_the_one_before():
    seen = Acceptance(6, chain=True)
    for _ in range(100):
        seen.observe([chain(0, 1, drafted=1)])
    assert seen.gains([0])[0][5] > 0.7
    for _ in range(100):
        seen.observe([chain(0, 0, drafted=1)])
    assert seen.gains([0])[0][0] < 0.1


def test_in_a_tree_nodes_are_counted_wherever_they_hang():
    seen = Acceptance(4, chain=False)
    for _ in range(80):
        seen.observe([Verified(0, 4, 4, (1, 3))])
    (gains,) = seen.gains([0])
    assert gains[0] < 0.1  # never accepted
    assert all(a >= b for a, b in itertools.pairwise(gains))


def test_what_is_not_made_is_known_as_well():
    seen = Acceptance(4, chain=True)
    for step in range(200):
        seen.observe([chain(0, 2, drafted=2, offered=4) if step % 2 else chain(0, 0, drafted=0, offered=4)])
    (shares,), (gains,) = seen.shares([0]), seen.gains([0])
    assert shares[0] == pytest.approx(0.5, abs=0.2) and shares[3] < 0.1
    assert gains[0] > 0.9  # when it is made


def test_slots_are_given_back():
    seen = Acceptance(3, chain=True)
    for row in range(1000):
        seen.observe([chain(row, 3, drafted=3)])
        seen.forget(row)
    assert seen._accepted.rows.shape[1] == 8
    for row in range(100):
        seen.observe([chain(row, 0, drafted=3)])
    assert seen._accepted.rows.shape[1] >= 100 and not seen.gains([99]).any() > 1
    seen.forget("nobody")


# -- costs ------------------------------------------------------------------------------------------
def flat(seconds=1.0):
    return MeasuredCurve({(1, 1): seconds, (1, 8): seconds, (64, 1): seconds, (64, 8): seconds})


def test_a_size_that_is_new_is_learned_at_once_and_alone():
    costs = StepCosts(flat())
    costs.observe(4, 1, 1.0)
    costs.observe(4, 4, 3.0)
    assert costs.seconds(4, 4) == pytest.approx(3.0)
    assert costs.seconds(4, 1) == pytest.approx(1.0)
    assert 1.0 < costs.seconds(4, 2) < 3.0 < costs.seconds(4, 8)  # in proportion


def test_when_a_load_grows_slower_all_its_sizes_do():
    costs = StepCosts(flat())
    for size in (1, 4):
        for _ in range(5):
            costs.observe(4, size, 1.0 + (size == 4))
    for _ in range(60):
        costs.observe(4, 4, 2.5)
    assert costs.seconds(4, 4) == pytest.approx(2.5, abs=0.05)
    assert costs.seconds(4, 1) == pytest.approx(1.33, abs=0.1)  # most of it is the load's
    assert costs.seconds(32, 1) == pytest.approx(1.0)  # another load


def test_a_hiccup_hardly_counts():
    costs = StepCosts(flat())
    for size in (1, 4):
        for _ in range(6):
            costs.observe(4, size, 1.0)
    costs.observe(4, 4, 100.0)
    assert costs.seconds(4, 4) < 1.1 and costs.seconds(4, 1) < 1.1


def test_of_sizes_that_were_measured_before_a_first_timing_is_not_believed_alone():
    costs = StepCosts()
    costs.replace(MeasuredCurve({(4, 1): 1.0, (4, 2): 1.5}), drafting=True)
    costs.observe(4, 2, 9.0)
    assert costs.seconds(4, 2) == 1.5
    costs.observe(4, 2, 1.7)  # the load's: longer texts
    assert costs.seconds(4, 2) == pytest.approx(1.7) and costs.seconds(4, 1) == pytest.approx(1.2)
    costs.observe(4, 1, 1.3)
    costs.observe(4, 1, 8.0)
    assert costs.seconds(4, 1) == pytest.approx(1.3) and costs.seconds(4, 2) == pytest.approx(1.7)
    for _ in range(2):
        costs.observe(8, 2, 4.0)  # twice is no hiccup
    assert costs.seconds(8, 2) == pytest.approx(4.0)


def test_another_curve_starts_anew():
    costs = StepCosts()
    costs.observe(4, 1, 7.0)
    assert costs.timed(3, 1) and costs.widest(4) == 1 and not costs.timed(5, 1)
    costs.replace(flat(2.0), drafting=True)
    assert costs.with_drafting and not costs.timed(4, 1) and costs.seconds(4, 1) == 2.0


def test_drafting_costs_nothing_until_it_was_timed():
    drafting = DraftCosts()
    assert drafting.seconds(4, 3) == 0 and drafting.widest(4) == 0
    drafting.observe(4, 0, 0.1)
    drafting.observe(4, 2, 0.5)
    assert drafting.seconds(4, 1) == pytest.approx(0.3) and drafting.widest(3) == 2
    for _ in range(50):
        drafting.observe(4, 2, 0.9)
    assert drafting.seconds(4, 2) == pytest.approx(0.9, abs=0.01)
