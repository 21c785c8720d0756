"""Logical slots to physical ones, as far as drafting may look."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from specdecode.engine.plan import RowPlan
from specdecode.engine.request import NO_DRAFTS, RowDrafts
from specdecode.kv.pool import NULL_BLOCK
from specdecode.runner.inputs import SlotMap

SIZE = 4


def row(num_tokens: int, blocks: list[int], drafts: RowDrafts = NO_DRAFTS) -> RowPlan:
    request = SimpleNamespace(token_ids=list(range(num_tokens)), table=SimpleNamespace(blocks=blocks))
    return RowPlan(request, num_tokens - 1, 1, drafts)  # type: ignore[arg-type]


def test_every_row_reaches_behind_the_drafts_and_scratch_slots_of_the_longest():
    drafts = RowDrafts((1, 2), (-1, 0))
    slots = SlotMap([row(2, [5]), row(5, [7, 8], drafts)], SIZE, torch.device("cpu"), scratch=3)
    last = 5 + 2 + 1 + 3 - 1
    assert slots.device.shape[1] * SIZE > last
    asked = torch.tensor([1, last, 7, last])
    written = slots.physical(torch.tensor([0, 0, 1, 1]), asked, torch.zeros(2, dtype=torch.int64))
    null = NULL_BLOCK * SIZE + last % SIZE
    assert written.tolist() == [5 * SIZE + 1, null, 8 * SIZE + 3, null]
