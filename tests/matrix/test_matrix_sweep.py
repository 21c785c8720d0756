"""The larger sweep, left out by default: other noise, block sizes, draft lengths and pairs of fields."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.sweep


@pytest.mark.parametrize("length", [1, 3, 5, 8])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_pairs_of_fields(matrix, proposer, block_size, length):
    """Every two values of two fields, with blocks and drafts of each size."""
    cases = matrix.pair_cases(10 * block_size + length)
    _compare(matrix, proposer, cases, length=length, block_size=block_size)


@pytest.mark.parametrize("seed", range(100, 108))
def test_every_field_with_other_noise(matrix, proposer, seed):
    _compare(matrix, proposer, matrix.seeded_cases(seed))


def _compare(matrix, proposer, cases, **options):
    wrong = [
        f"{circumstance.name}: {fault}"
        for circumstance in matrix.circumstances
        for fault in matrix.compare(proposer, circumstance, cases, strict=False, **options)
    ]
    assert not wrong, f"{len(wrong)} differences:\n" + "\n".join(wrong[:8])
