"""What the host proposers replay."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from specdecode.testing.scripted.config import OracleTreeConfig
from specdecode.testing.scripted.oracle import OracleTreeProposer, Script, spoil

VOCAB = 50


def test_script_follows_the_first_text_that_goes_on():
    script = Script([[1, 2, 3], [1, 2, 4, 5, 6], [1, 2, 4, 9]])
    assert script.follow([1, 2], 5) == [3]
    assert script.follow([1, 2, 4], 2) == [5, 6]
    assert script.follow((1, 2, 3), 2) == []  # at its end
    assert script.follow([7], 2) == []


def test_a_spoiled_id_is_another_one_of_the_vocabulary():
    assert all(spoil(token, VOCAB) != token and 0 <= spoil(token, VOCAB) < VOCAB for token in range(VOCAB))


@given(
    count=st.integers(1, 12),
    levels=st.integers(1, 6),
    seed=st.integers(0, 50),
    history=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6),
)
def test_oracle_tree(count, levels, seed, history):
    text = history + [(7 * step) % VOCAB for step in range(1, 9)]
    config = OracleTreeConfig(num_speculative_tokens=12, depth=levels, texts=(tuple(text),), seed=seed)
    ids, parents = OracleTreeProposer(config, VOCAB)._tree(history, count, levels)
    assert (ids, parents) == OracleTreeProposer(config, VOCAB)._tree(history, count, levels)
    assert len(ids) == len(parents) == count
    depths: list[int] = []
    for node, (token, parent) in enumerate(zip(ids, parents, strict=True)):
        assert -1 <= parent < node and 0 <= token < VOCAB
        depths.append(1 if parent < 0 else depths[parent] + 1)
    assert max(depths) <= levels


def test_oracle_tree_hides_its_text_behind_decoys():
    text = tuple(range(20))
    config = OracleTreeConfig(num_speculative_tokens=9, texts=(text,))
    reached, scrambled, repeated = [], 0, 0
    for length in range(1, 12):
        ids, parents = OracleTreeProposer(config, VOCAB)._tree(text[:length], 9, 9)
        node, level = -1, 0
        while (child := _child(ids, parents, node, text[length + level])) is not None:
            node, level = child, level + 1
        reached.append(level)
        scrambled += parents != list(range(-1, 8))
        repeated += len(set(zip(ids, parents, strict=True))) < 9
    assert max(reached) >= 4 and scrambled >= 10 and repeated >= 2


def _child(ids, parents, node, token):
    found = [n for n, (t, p) in enumerate(zip(ids, parents, strict=True)) if (t, p) == (token, node)]
    return found[0] if found else None
