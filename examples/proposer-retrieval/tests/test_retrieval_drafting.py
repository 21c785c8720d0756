"""Which continuations are drafted, against brute force."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_retrieval.drafting import chance, most_frequent
from specdec_retrieval.suffix_array import END


@st.composite
def continuations(draw):
    depth = draw(st.integers(1, 4))
    rows = draw(st.lists(st.lists(st.integers(0, 2), max_size=depth), min_size=1, max_size=12))
    return np.array([row + [END] * (depth - len(row)) for row in rows], np.int32)


def paths(draft):
    """Node -> the tokens from the root to it."""
    found = []
    for token, parent in zip(draft.token_ids, draft.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def score(rows, path, trust):
    share = sum(tuple(row[: len(path)]) == path for row in rows.tolist()) / len(rows)
    return share * trust ** len(path)


@given(continuations(), st.integers(1, 6), st.sampled_from([0.0, 0.2, 0.5]))
@settings(max_examples=100, deadline=None)
def test_a_chain_takes_the_most_frequent_token_at_each_level(rows, most, least):
    expected, left = [], rows.tolist()
    while len(expected) < min(most, rows.shape[1]):
        level = len(expected)
        tokens = [row[level] for row in left]
        # max takes the first of equals, which is the one that stands higher
        best = max((t for t in tokens if t != END), key=tokens.count, default=None)
        if best is None or score(rows, (*expected, best), 0.8) < least - 1e-12:
            break
        expected.append(best)
        left = [row for row in left if row[level] == best]
    draft = most_frequent(rows, 0.8, most=most, least_score=least, tree=False)
    assert draft.token_ids == expected
    assert draft.parents == list(range(-1, len(expected) - 1))
    assert draft.scores == pytest.approx([score(rows, p, 0.8) for p in paths(draft)])


@given(continuations(), st.integers(1, 10), st.sampled_from([0.0, 0.2]))
@settings(max_examples=100, deadline=None)
def test_a_tree_has_the_continuations_of_the_highest_scores(rows, most, least):
    draft = most_frequent(rows, 0.8, most=most, least_score=least, tree=True)
    drafted = paths(draft)
    every = {tuple(row[:n]) for row in rows.tolist() for n in range(1, len(row) + 1) if END not in row[:n]}
    best = sorted((s for p in every if (s := score(rows, p, 0.8)) >= least - 1e-12), reverse=True)[:most]
    assert len(set(drafted)) == len(drafted)
    assert all(parent < node for node, parent in enumerate(draft.parents))
    assert draft.scores == pytest.approx([score(rows, p, 0.8) for p in drafted])
    assert draft.scores == pytest.approx(best)


def test_an_answer_that_ended_counts_as_another_way():
    rows = np.array([[5, 6], [5, END], [END, END], [END, END]], np.int32)
    assert most_frequent(rows, 1.0, most=4, least_score=0.0, tree=False).scores == [0.5, 0.25]


def test_short_matches_are_trusted_with_fewer_drafts():
    rows = np.arange(10, dtype=np.int32)[None]
    lengths = [
        len(most_frequent(rows, chance(n), most=10, least_score=0.2, tree=False).token_ids)
        for n in (1, 2, 3, 6, 20)
    ]
    assert lengths == [2, 3, 7, 10, 10]
