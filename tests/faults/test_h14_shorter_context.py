"""H14: a drafter of a shorter context stops at its end, and harms neither that request nor its neighbours.

The drafter's limit is 16, the target's 64.
"""

from __future__ import annotations

import json
import logging
import shutil

import pytest

LIMIT = 16
DRAFTERS = ("draft_model", "draft_model-of-16", "eagle", "eagle3", "eagle3-grown")


@pytest.fixture
def config_of(fault_lab, tmp_path):
    """``config_of(name)``: a drafter over TINY that drafts up to position 16, told so or made so."""

    def make(name):
        target = fault_lab.lab.target
        if name.startswith("draft_model"):
            own = shutil.copytree(target, tmp_path / name)
            told = {"max_model_len": LIMIT}
            if name.endswith("of-16"):
                fields = json.loads((own / "config.json").read_text("utf-8"))
                (own / "config.json").write_text(
                    json.dumps(fields | {"max_position_embeddings": LIMIT}), "utf-8"
                )
                told = {}
            return {"method": "draft_model", "model": str(own), "num_speculative_tokens": 4, **told}
        testing = pytest.importorskip("specdec_eagle.testing")
        layout = name.split("-")[0]
        layers = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]} if layout == "eagle3" else {}
        head = testing.write_head(tmp_path / name, layout, target, **layers)
        shape = {"tree_top_k": 2, "num_speculative_tokens": 8} if name.endswith("grown") else {}
        return {
            "method": layout,
            "model": str(head),
            "num_speculative_tokens": 4,
            "max_model_len": LIMIT,
            **shape,
        }

    return make


def deepest(parents):
    depths = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)


@pytest.mark.parametrize("late", [False, True], ids=["plain", "late"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_h14_one_long_request_and_a_short_one(faults, same, config_of, caplog, drafter, late):
    pytest.importorskip(f"specdec_{'draft' if drafter.startswith('draft') else 'eagle'}")
    asks = [faults.ask(range(9, 14), max_tokens=45, ignore_eos=True), faults.ask(range(30, 35), max_tokens=6)]
    asks.append(faults.ask(faults.prompt(3), temperature=1.0, seed=3, max_tokens=20))  # its prompt is longer
    again = [faults.ask(range(50, 55), max_tokens=9, ignore_eos=True)]
    with caplog.at_level(logging.WARNING):
        engine = faults.engine(config_of(drafter), max_model_len=64, async_scheduling=late)
        caplog.clear() if drafter.startswith("eagle") else None
        same(engine.generate(asks), faults.base(asks, max_model_len=64))
        drafted = [record for record in engine.recording.drafts if record.ids]
        assert all(len(record.history) + deepest(record.parents) <= LIMIT for record in drafted)
        lengths = {tuple(record.history[: record.prompt_len]) for record in drafted}
        assert lengths == {tuple(ask.prompt) for ask in asks[:2]}  # the third never is
        engine.recording.drafts.clear()
        same(engine.generate(again), faults.base(again, max_model_len=64))
        assert any(record.ids for record in engine.recording.drafts)
    context = [record for record in caplog.records if "context" in record.getMessage()]
    assert len(context) <= 1
