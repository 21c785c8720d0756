"""The incremental index against a search of the whole text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specdec_ngram.index import NgramIndex


def brute_force(text, shortest, longest):
    """Position after the most recent earlier occurrence of the longest matching tail, and its length."""
    for n in range(longest, shortest - 1, -1):
        if n >= len(text):
            continue
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                return end, n
    return None


def matched(text, shortest, longest):
    index = NgramIndex(shortest, longest)
    index.extend(text)
    return index.match(text)


@settings(deadline=None)
@given(
    text=st.lists(st.integers(0, 3), max_size=60),
    bounds=st.tuples(st.integers(1, 6), st.integers(1, 6)).map(sorted),
    cuts=st.lists(st.integers(0, 60), max_size=8).map(sorted),
)
def test_any_way_of_growing_finds_what_a_search_finds(text, bounds, cuts):
    shortest, longest = bounds
    index = NgramIndex(shortest, longest)
    for cut in [*cuts, len(text)]:
        known = text[:cut]
        index.extend(known)
        assert index.match(known) == brute_force(known, shortest, longest)


def test_the_longest_window_wins_over_a_more_recent_shorter_one():
    text = [7, 8, 9, 1, 8, 9, 2, 7, 8, 9]
    assert matched(text, 1, 3) == (3, 3)
    assert matched(text, 1, 2) == (6, 2)


def test_of_equal_windows_the_most_recent_wins():
    assert matched([5, 1, 5, 2, 5], 1, 4) == (3, 1)


def test_the_tail_does_not_match_itself_but_may_overlap_its_match():
    assert matched([1, 2, 3], 2, 3) is None
    assert matched([4, 4], 1, 3) == (1, 1)
    assert matched([4] * 9, 1, 3) == (8, 3)


@pytest.mark.parametrize("text", [[], [1], [1, 2, 3, 9, 8, 1, 2, 3]])
def test_nothing_matches_where_no_window_fits(text):
    assert matched(text, 4, 4) is None


def test_catching_up_reads_only_what_is_new():
    class Counting(list):
        read = 0

        def __getitem__(self, key):
            if isinstance(key, slice):
                Counting.read += len(range(*key.indices(len(self))))
            return list.__getitem__(self, key)

    text = Counting(i * i % 97 for i in range(5000))
    index = NgramIndex(2, 5)
    index.extend(text)
    Counting.read = 0
    for token in range(50):
        text.append(token)
        index.extend(text)
        index.match(text)
    windows = 4
    assert Counting.read <= 50 * (windows + 1) * 5


def test_an_entry_a_token_and_window():
    index = NgramIndex(2, 3)
    index.extend(list(range(1000)))
    assert len(index._next) == (999 - 1) + (999 - 2)
