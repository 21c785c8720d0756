"""What proposers are fed in the plain order, as their attention sees it."""

from __future__ import annotations

import pytest
from specdec_kernels.attention import AttentionMetadata
from specdecode.engine import feed


@pytest.mark.parametrize("method", ["self-draft", "eagle", "draft-model"])
@pytest.mark.parametrize("order", ["plain", "late"])
def test_what_is_fed_tells_how_its_tokens_lie(lab, monkeypatch, method, order):
    """So that attention takes a prompt's tokens together, and not one by one."""
    made = []

    def note(**parts):
        made.append(AttentionMetadata(**parts))
        return made[-1]

    monkeypatch.setattr(feed, "AttentionMetadata", note)
    asks = lab.mixed(max_tokens=20)
    with lab.rig(method, asks, order, max_num_batched_tokens=16) as rig:
        rig.generate(asks)
    told = [meta for meta in made if meta.lengths is not None]
    assert any(len(meta.lengths) > 1 and max(meta.lengths) > 1 for meta in told)
    for meta in told:
        assert meta.rows.tolist() == [row for row, count in enumerate(meta.lengths) for _ in range(count)]
    assert all(meta.lengths is not None for meta in made if len(meta.rows) > len(meta.block_table))
