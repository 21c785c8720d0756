"""The walk against a brute force over all paths, and the registry of rules."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specdecode.contract import Unsupported
from specdecode.verify import Verdict, rule, walk


@st.composite
def trees(draw, max_nodes=9, vocab_size=3):
    size = draw(st.integers(0, max_nodes))
    token = st.integers(0, vocab_size - 1)
    ids = draw(st.lists(token, min_size=size, max_size=size))
    parents = [draw(st.integers(-1, i - 1)) for i in range(size)]
    targets = draw(st.lists(token, min_size=size + 1, max_size=size + 1))
    return targets, ids, parents


def brute_force(targets, ids, parents):
    """Follow the children of each node, one by one, from the root."""
    node, accepted = -1, []
    while True:
        children = [i for i, parent in enumerate(parents) if parent == node and ids[i] == targets[node + 1]]
        if not children:
            return tuple(accepted), (*(ids[i] for i in accepted), targets[node + 1])
        node = children[0]
        accepted.append(node)


@given(trees())
@settings(max_examples=500, deadline=None)
def test_walk_equals_brute_force(tree):
    verdict = walk(*tree)
    assert (verdict.accepted, verdict.tokens) == brute_force(*tree)


@given(trees())
@settings(max_examples=100, deadline=None)
def test_a_verdict_is_a_path_of_targets_and_one_more(tree):
    targets, _, parents = tree
    verdict = walk(*tree)
    path = (-1, *verdict.accepted)
    assert [parents[i] for i in verdict.accepted] == list(path[:-1])
    assert list(verdict.tokens) == [targets[node + 1] for node in path]
    assert len(verdict.tokens) == len(verdict.accepted) + 1


def test_no_drafts_is_plain_decoding():
    assert walk([7], [], []) == Verdict((), (7,))


@pytest.mark.parametrize("right", range(4))
def test_a_chain_is_accepted_up_to_the_first_difference(right):
    targets, ids = [1, 2, 3, 4], [1, 2, 3]
    if right < 3:
        ids[right] = 9
    verdict = walk(targets, ids, [-1, 0, 1])
    assert verdict == Verdict(tuple(range(right)), tuple(targets[: right + 1]))


def test_the_first_of_equal_siblings_wins_with_its_subtree():
    #        root -> 5 (0), 5 (1), 6 (2);  1 -> 8 (3);  0 -> 9 (4)
    ids, parents = [5, 5, 6, 8, 9], [-1, -1, -1, 1, 0]
    assert walk([5, 9, 8, 0, 0, 4], ids, parents) == Verdict((0, 4), (5, 9, 4))
    assert walk([5, 8, 8, 0, 0, 4], ids, parents) == Verdict((0,), (5, 8))


def test_a_scrambled_tree():
    #        root -> 3 (0), 1 (1);  1 -> 4 (2), 2 (4);  0 -> 2 (3);  4 -> 7 (5)
    ids, parents = [3, 1, 4, 2, 2, 7], [-1, -1, 1, 0, 1, 4]
    assert walk([1, 0, 2, 0, 0, 7, 6], ids, parents) == Verdict((1, 4, 5), (1, 2, 7, 6))


@pytest.mark.parametrize(
    ("targets", "ids", "parents"), [([1], [1], [-1]), ([1, 2], [1], []), ([], [], []), ([1, 2], [], [])]
)
def test_lengths_that_do_not_fit_are_an_error(targets, ids, parents):
    with pytest.raises(ValueError, match="targets and"):
        walk(targets, ids, parents)


def test_the_registry():
    assert rule("invariant").compare is walk and rule("invariant").weigh is None
    for name in ("standard", "block", "typical"):
        assert rule(name).compare is walk and rule(name).weigh is not None
    with pytest.raises(Unsupported, match=r"rejection_sample_method='lucky'.*'invariant'"):
        rule("lucky")
