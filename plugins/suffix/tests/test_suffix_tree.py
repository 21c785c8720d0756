"""The tree against counting by hand, and what it holds when texts grow, end and are forgotten."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specdec_suffix.drafting import NOTHING, Limits, speculate
from specdec_suffix.tree import Node, SuffixTree, count_of

TEXTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=25), min_size=1, max_size=6)


def stretches(texts, depth):
    """How often each stretch of at most ``depth`` tokens occurs."""
    return Counter(
        tuple(text[start : start + length])
        for text in texts
        for start in range(len(text))
        for length in range(1, min(depth, len(text) - start) + 1)
    )


def counted(tree):
    """The same, read off the tree; and its nodes."""
    found, nodes = Counter(), []

    def walk(node, path):
        edge = tuple(tree.run(node, len(path)))
        for length in range(1, len(edge) + 1):
            found[path + edge[:length]] = count_of(node)
        if isinstance(node, Node):
            nodes.append(node)
            path += edge
            ranked = list(node.ranked())
            assert sorted(ranked) == sorted(node.children)
            counts = [count_of(node.children[token]) for token in ranked]
            assert node is tree.root or counts == sorted(counts, reverse=True)
            assert node is tree.root or counts != [node.count]  # nothing ends here: an edge, not a node
            for token, child in node.children.items():
                assert tree.run(child, len(path))[0] == token
                assert not isinstance(child, Node) or child.parent is node
                walk(child, path)

    walk(tree.root, ())
    return found, nodes


@settings(deadline=None)
@given(texts=TEXTS, depth=st.integers(2, 7), seed=st.randoms(use_true_random=False))
def test_it_counts_every_stretch_whatever_grows_beside_what(texts, depth, seed):
    tree, left = SuffixTree(depth), {key: list(text) for key, text in enumerate(texts)}
    while left:
        key = seed.choice(sorted(left))
        size = seed.randint(1, 4)
        tree.extend(key, left[key][:size])
        left[key] = left[key][size:]
        if not left[key]:
            del left[key]
            if seed.random() < 0.5:
                tree.close(key)
    assert counted(tree)[0] == stretches(texts, depth)
    while texts:
        tree.remove(len(texts) - 1)
        texts.pop()
        assert counted(tree)[0] == stretches(texts, depth)
    assert counted(tree)[1] == [tree.root] and tree.root.count == 0 and tree.num_texts == 0


@settings(deadline=None)
@given(text=st.lists(st.integers(0, 2), min_size=2, max_size=60), depth=st.integers(2, 6))
def test_where_a_growing_text_ends_is_where_a_search_finds_it(text, depth):
    """Suffixes that occurred before are known by their end; longer ones occur once."""
    tree = SuffixTree(depth)
    for token in text:
        tree.extend(0, [token])
    ends = tree.ends(0)
    counts = stretches([text], depth)
    for length in range(1, min(depth - 1, len(text)) + 1):
        suffix = tuple(text[-length:])
        if length <= len(ends):
            assert tree.find(suffix) == (ends[length - 1], len(ends[length - 1].edge))
        else:
            assert counts[suffix] == 1
    assert tree.find((7,)) is None


@settings(deadline=None, max_examples=40)
@given(texts=TEXTS)
def test_nodes_are_no_more_than_tokens(texts):
    """The bound of its memory, whatever is written."""
    tree = SuffixTree(6)
    for key, text in enumerate(texts):
        tree.extend(key, text)
    assert len(counted(tree)[1]) <= 2 * sum(map(len, texts))


def test_plain_text_costs_no_node_a_token():
    tree = SuffixTree(24)
    tree.extend(0, range(5000))
    assert counted(SuffixTree(4))[1] and len(tree.root.children) == 5000
    assert not any(isinstance(child, Node) for child in tree.root.children.values())


# -- drafts ---------------------------------------------------------------------------------------
def draft(texts, context, **limits):
    tree = SuffixTree(12)
    for key, text in enumerate(texts):
        tree.extend(key, text)
    return speculate(tree, context, Limits(**{"most": 8, "factor": 1.0, "min_prob": 0.1} | limits))


def test_a_longer_match_drafts_more():
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    for length, drafted in ((1, [5]), (2, [5, 6]), (3, [5, 6, 7])):
        found = draft([text], [0, *text[4 - length : 4]])
        assert ([*found.token_ids], found.match_len, found.score) == (drafted, length, length)
    assert [*draft([text], [0, 4], factor=3.5).token_ids] == [5, 6, 7]
    assert draft([text], [0, 4], factor=0.5) == NOTHING


def test_what_came_more_often_is_drafted_with_its_share():
    texts = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 5], [1, 2, 6]]
    found = draft(texts, [0, 1, 2], factor=2.0)
    assert [*found.token_ids] == [3, 5] and [*found.parents] == [-1, 0]
    assert [*found.probs] == pytest.approx([0.75, 0.5])
    assert [*draft(texts, [0, 1, 2], factor=2.0, min_prob=0.6).token_ids] == [3]
    assert draft(texts, [0, 1, 2], min_prob=0.8) == NOTHING


def test_a_tree_holds_several_ways_to_go_on():
    texts = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 5], [1, 2, 6, 7]]
    found = draft(texts, [0, 1, 2], factor=3.0, tree=True)
    nodes = {
        (found.token_ids[parent] if parent >= 0 else None, token): prob
        for token, parent, prob in zip(found.token_ids, found.parents, found.probs, strict=True)
    }
    assert nodes == pytest.approx({(None, 3): 0.75, (3, 5): 0.5, (3, 4): 0.25, (None, 6): 0.25, (6, 7): 0.25})


@pytest.mark.parametrize("context", [[], [1], [9, 9], [8, 7]])
def test_nothing_where_nothing_matches(context):
    assert draft([[1, 2, 3]], context) == NOTHING


def test_depth_bounds_match_and_draft_together():
    tree = SuffixTree(5)
    tree.extend(0, [1, 2, 3, 4, 5, 6, 7, 8])
    found = speculate(tree, [1, 2, 3, 4], Limits(most=9, factor=9.0, min_prob=0.0))
    assert [*found.token_ids] == [5, 6, 7, 8] and found.match_len == 1
