"""How many nodes of a tree pay, by what steps cost."""

from __future__ import annotations

import itertools
import math

import pytest
from specdecode.engine.pacing import MeasuredCurve
from specdecode.heads.sizing import MOST_NODES, choose_nodes, expected_gains


def listed(fanout, depth, first, fall):
    """Every node's chance, written out."""
    return sorted(
        (
            first**level * math.prod((rank + 1) ** -fall for rank in ranks)
            for level in range(1, depth + 1)
            for ranks in itertools.product(range(fanout), repeat=level)
        ),
        reverse=True,
    )


@pytest.mark.parametrize(("fanout", "depth"), [(1, 4), (3, 1), (3, 3), (4, 2)])
def test_gains_are_those_of_the_best_nodes(fanout, depth):
    every = listed(fanout, depth, 0.6, 2.0)
    assert expected_gains(fanout, depth, 1000, first=0.6, fall=2.0) == pytest.approx(every)
    assert expected_gains(fanout, depth, 5, first=0.6, fall=2.0) == pytest.approx(every[:5])


def costs(seconds):
    asked = []

    def measure(points):
        asked.extend(points)
        return MeasuredCurve({point: seconds(*point) for point in points})

    return measure, asked


def test_the_sizes_that_are_measured_span_all_trees():
    measure, asked = costs(lambda rows, tokens: 1.0 + tokens)
    choose_nodes(measure, expected_gains(8, 8, MOST_NODES))
    assert asked == [(1, 1), (1, 2), (1, 4), (1, 8), (1, 16), (1, 32), (1, 1 + MOST_NODES)]


@pytest.mark.parametrize(
    ("per_token", "least", "most"),
    [(0.0, MOST_NODES, MOST_NODES), (0.005, 30, MOST_NODES), (0.02, 8, 30), (0.1, 2, 8), (1.0, 1, 2)],
)
def test_the_dearer_a_token_the_smaller_the_tree(per_token, least, most):
    measure, _ = costs(lambda rows, tokens: 1.0 + per_token * tokens)
    assert least <= choose_nodes(measure, expected_gains(8, 8, MOST_NODES)) <= most


def test_a_step_of_the_device_is_where_the_tree_ends():
    """Up to 16 tokens cost nothing, more cost half as much again."""
    measure, _ = costs(lambda rows, tokens: 1.0 if tokens <= 16 else 1.5 + tokens / 100)
    assert choose_nodes(measure, expected_gains(8, 8, MOST_NODES)) == 15


def test_a_small_tree_is_measured_to_its_end():
    measure, asked = costs(lambda rows, tokens: 1.0)
    assert choose_nodes(measure, expected_gains(2, 2, MOST_NODES)) == 6
    assert asked[-1] == (1, 7)
