"""Sorting and finding, against brute force."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_retrieval.suffix_array import END, Match, SuffixArray, sort_places

answers = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=8)
contexts = st.lists(st.integers(0, 4), max_size=8)


def joined(texts):
    return np.array([token for text in texts for token in (*text, END)], np.int32)


def stands_at(text, wanted):
    """All places where ``wanted`` stands."""
    return [i for i in range(len(text) - len(wanted)) if list(text[i : i + len(wanted)]) == wanted]


@given(answers, st.integers(1, 20))
@settings(max_examples=100, deadline=None)
def test_places_are_sorted_by_what_stands_there(texts, tokens):
    text = joined(texts)
    order = sort_places(text, tokens).tolist()
    assert sorted(order) == np.flatnonzero(text != END).tolist()
    keys = [text[place : place + tokens].tolist() for place in order]
    assert keys == sorted(keys)


@given(answers, contexts.filter(len))
@settings(max_examples=100, deadline=None)
def test_all_places_of_a_stretch_are_found(texts, wanted):
    text = joined(texts)
    order = sort_places(text, 8)
    low, high = SuffixArray(text, order).find(wanted)
    assert sorted(order[low:high].tolist()) == stands_at(text, wanted)


@given(answers, contexts, st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_the_longest_end_of_a_context_is_found(texts, context, shortest):
    text = joined(texts)
    order = sort_places(text, 8)
    match = SuffixArray(text, order).longest(context, shortest)
    ends = [n for n in range(shortest, len(context) + 1) if stands_at(text, context[len(context) - n :])]
    if not ends:
        assert match is None
        return
    assert match is not None and match.length == max(ends)
    places = stands_at(text, context[len(context) - max(ends) :])
    assert sorted(order[match.low : match.high].tolist()) == places


@given(answers, st.integers(0, 3), st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_continuations_end_with_their_answer_and_the_latest_is_first(texts, token, depth):
    text = joined(texts)
    index = SuffixArray(text, sort_places(text, 8))
    low, high = index.find([token])
    if low == high:
        return
    rows = index.continuations(Match(1, low, high), depth, 1000)
    expected = []
    for answer in texts:
        for at, here in enumerate(answer):
            if here == token:
                behind = answer[at + 1 : at + 1 + depth]
                expected.append(behind + [END] * (depth - len(behind)))
    assert rows.tolist() == expected[::-1]


def test_a_sample_of_many_places_keeps_each_continuation_s_share():
    text = joined([[7, 1]] * 300 + [[7, 2]] * 100)
    index = SuffixArray(text, sort_places(text, 4))
    rows = index.continuations(Match(1, *index.find([7])), 1, 40)
    assert np.unique(rows, return_counts=True)[1].tolist() == [30, 10]
