"""Covering designs hold every pair of values, in few rows."""

from __future__ import annotations

import itertools

import pytest
from specdecode.testing.covering import covering_pairs

FACTORS = {
    "two": {"a": [0, 1], "b": [0, 1, 2]},
    "many": {f"f{number}": list(range(2 + number % 3)) for number in range(12)},
    "one value each": {"a": [0], "b": [0], "c": [0]},
}


@pytest.mark.parametrize("name", FACTORS)
@pytest.mark.parametrize("seed", [0, 1])
def test_every_pair_of_values_meets(name, seed):
    factors = FACTORS[name]
    rows = covering_pairs(factors, seed)
    met = {pair for row in rows for pair in itertools.combinations(sorted(row.items()), 2)}
    values = {factor: [(factor, value) for value in range(len(of))] for factor, of in factors.items()}
    wanted = {
        pair
        for first, second in itertools.combinations(sorted(factors), 2)
        for pair in itertools.product(values[first], values[second])
    }
    assert met == wanted
    assert all(set(row) == set(factors) for row in rows)


def test_far_fewer_rows_than_combinations():
    assert len(covering_pairs(FACTORS["many"])) <= 30  # of 331,776; no design has less than 16


def test_seeds_give_other_designs():
    factors = FACTORS["many"]
    assert covering_pairs(factors, 0) == covering_pairs(factors, 0) != covering_pairs(factors, 1)
