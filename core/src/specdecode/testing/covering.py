"""Covering designs: few combinations in which every two values of any two factors meet."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

#: One combination: factor -> which of its values.
Combination = dict[str, int]


def covering_pairs(factors: Mapping[str, Sequence[object]], seed: int = 0) -> list[Combination]:
    """Combinations in which every pair of values of two factors occurs at least once.

    Greedy, after AETG (Cohen, Dalal, Fredman and Patton, IEEE TSE 1997): each begins with a pair that
    is still missing and takes for each further factor the value that meets most missing pairs.

    Args:
        factors: name -> its values, at least one each.
        seed: of the order in which factors are filled and ties are broken.
    """
    rng = np.random.default_rng(seed)
    missing = {
        frozenset({(a, i), (b, j)})
        for a, b in itertools.combinations(factors, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }
    rows: list[Combination] = []
    while missing:
        row: Combination = dict(min(missing, key=sorted))
        for name in rng.permutation([name for name in factors if name not in row]).tolist():
            gains = [
                sum(frozenset({(name, value), chosen}) in missing for chosen in row.items())
                for value in range(len(factors[name]))
            ]
            row[name] = int(rng.choice(np.flatnonzero(np.array(gains) == max(gains))))
        missing -= {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}
        rows.append(row)
    return rows
