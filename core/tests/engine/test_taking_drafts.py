"""Taking drafts out of a proposer's buffers: what is kept of a row, and what counts as a fault."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from specdecode.contract import Drafts
from specdecode.engine.request import NO_DRAFTS
from specdecode.engine.taking import take_drafts


def taken(ids, parents, *, budget=8, room=8, claimed=None, chain=False):
    """The drafts one row is left with, and the faults."""
    request = SimpleNamespace(drafts=NO_DRAFTS, params=SimpleNamespace(greedy=True))
    row = SimpleNamespace(request=request, budget=budget, room=room)
    drafts = Drafts(
        ids=np.array([ids], np.int64),
        parents=np.array([parents], np.int64),
        lens=np.array([len(ids) if claimed is None else claimed], np.int64),
        score=np.zeros((1, len(ids)), np.float32),
    )
    faults = take_drafts(drafts, [row], 10, chain=chain, weighed=False)
    return list(request.drafts.ids), list(request.drafts.parents), faults


@pytest.mark.parametrize(
    ("room", "kept"),
    [
        (0, ([], [])),
        (1, ([1, 4], [-1, -1])),
        (2, ([1, 2, 4], [-1, 0, -1])),
        (3, ([1, 2, 3, 4], [-1, 0, 1, -1])),
    ],
)
def test_nodes_deeper_than_the_room_are_left_out_without_fault(room, kept):
    assert taken([1, 2, 3, 4], [-1, 0, 1, -1], room=room) == (*kept, 0)


def test_a_row_ends_at_its_first_bad_node():
    assert taken([1, 10, 3], [-1, 0, 1]) == ([1], [-1], 2)
    assert taken([1, -1, 3], [-1, 0, 1]) == ([1], [-1], 2)
    assert taken([1, 2, 3], [-1, 1, 0]) == ([1], [-1], 2)
    assert taken([1, 2, 3], [-1, -2, 0]) == ([1], [-1], 2)


def test_a_chain_is_cut_where_it_branches():
    assert taken([1, 2, 3], [-1, 0, 0], chain=True) == ([1, 2], [-1, 0], 1)


def test_more_than_the_budget_is_a_fault():
    assert taken([1, 2, 3], [-1, 0, 1], budget=2) == ([1, 2], [-1, 0], 1)
    assert taken([1, 2, 3], [-1, 0, 1], claimed=0) == ([], [], 0)
