"""Reduced vocabularies as heads store them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from specdecode.contract import CheckpointInfo, ConfigError
from specdecode.heads.vocabulary import draft_ids, is_padding

SIZE = 10


@pytest.fixture
def head(tmp_path):
    def make(dummy=False, **tensors):
        held = {name: torch.tensor(value) for name, value in tensors.items()}
        if held:
            save_file(held, tmp_path / "model.safetensors")
        return CheckpointInfo(path=tmp_path, config={}, tensors={}, dummy=dummy), {n: n for n in held}

    return make


def mask(*kept):
    return [i in kept for i in range(SIZE)]


@pytest.mark.parametrize(
    "tensors",
    [
        {"d2t": [1, 2, 5]},
        {"token_map": [1, 3, 7]},
        {"t2d": mask(1, 3, 7)},
        {"d2t": [1, 2, 5], "t2d": mask(1, 3, 7)},
    ],
)
def test_every_kind_of_map(head, tensors):
    assert draft_ids(*head(**tensors), 3, SIZE, "head").tolist() == [1, 3, 7]


def test_a_map_of_all_tokens_is_none(head):
    assert draft_ids(*head(d2t=[0] * SIZE), SIZE, SIZE, "head") is None
    assert draft_ids(*head(), None, SIZE, "head") is None


@pytest.mark.parametrize(
    ("tensors", "rows", "said"),
    [
        ({"d2t": [1, 2, 5]}, 4, "d2t maps 3 draft ids, lm_head.weight has 4 rows"),
        ({"d2t": [1, 2, 8]}, 3, "d2t maps draft id 2 to 10, outside the target's vocabulary of 10; 1 of 3"),
        ({"token_map": [-1, 2]}, None, "token_map maps draft id 0 to -1"),
        ({"token_map": [2, 2]}, None, "two draft ids to one"),
        ({"d2t": [1, 2, 5], "t2d": mask(1, 3, 8)}, 3, "d2t and t2d keep different ids"),
    ],
)
def test_a_damaged_map_is_named(head, tensors, rows, said):
    with pytest.raises(ConfigError, match=said):
        draft_ids(*head(**tensors), rows, SIZE, "head")


@pytest.mark.parametrize(("rows", "count"), [(4, 4), (SIZE, None), (None, None)])
def test_a_head_without_weights_drafts_from_any_tokens(head, rows, count):
    """They are told by the size of its output layer alone."""
    ids = draft_ids(*head(dummy=True), rows, SIZE, "head")
    if count is None:
        assert ids is None
    else:
        assert len(np.unique(ids)) == count and ids.min() >= 0 and ids.max() < SIZE


@pytest.mark.parametrize(
    ("size", "other", "one"),
    [(32000, 32064, True), (151936, 151669, True), (32000, 32512, False), (300, 304, True), (40, 300, False)],
)
def test_sizes_that_differ_by_padding(size, other, one):
    assert is_padding(size, other) is is_padding(other, size) is one
