"""A tree whose size nobody said takes as many nodes as pay on the device at hand."""

from __future__ import annotations

import pytest
from specdec_eagle.testing import write_head
from specdecode import LLM, SamplingParams
from specdecode.contract import ConfigError
from specdecode.engine.pacing import MeasuredCurve
from specdecode.heads.sizing import MOST_NODES
from specdecode.plugins import default_manager, prepare

GROWN = {"tree_top_k": 3, "tree_depth": 4}
PROMPTS = [[3 + (7 * i + j) % 290 for j in range(4 + 9 * i)] for i in range(4)]
KINDS = ({"temperature": 0}, {"temperature": 0.9, "seed": 5})


@pytest.fixture(scope="module")
def head(target, tmp_path_factory):
    return str(write_head(tmp_path_factory.mktemp("sized") / "head", "eagle3-speculators", target))


def engine_of(target, config, **options):
    defaults = {
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": 96,
        "num_gpu_blocks_override": 200,
        "max_num_seqs": 8,
        "skip_tokenizer_init": True,
    }
    return LLM(str(target), speculative_config=config, **(defaults | options))


def ids(llm):
    params = [SamplingParams(max_tokens=24, ignore_eos=True, **KINDS[i % 2]) for i in range(len(PROMPTS))]
    outputs = llm.generate([{"prompt_token_ids": own} for own in PROMPTS], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def plain(target):
    with engine_of(target, None) as llm:
        return ids(llm)


@pytest.fixture
def device(monkeypatch):
    """``device(free)``: a machine on which ``free`` tokens cost no more than one, and more of them much."""
    from specdecode.api import assemble

    asked = []

    def make(free):
        def costs(runner, points, *, captured):
            asked.extend(points)
            return MeasuredCurve({(r, t): 1.0 if t <= free else 1.0 + t for r, t in points})

        monkeypatch.setattr(assemble, "target_costs", costs)
        return asked

    return make


@pytest.mark.parametrize(
    ("keys", "width"),
    [
        (GROWN, 30),  # 3 + 3 * 9
        ({"tree_top_k": 8}, MOST_NODES),
        ({"tree_top_k": 1}, 8),
        ({**GROWN, "num_speculative_tokens": 10}, 10),
        ({}, 3),  # a chain, and what the checkpoint proposes
    ],
)
def test_what_is_declared_before_anything_is_measured(info, head, keys, width):
    assert prepare(default_manager(), {"model": head, **keys}, info).needs.width == width


def test_a_chain_must_be_given_a_length(target, info, tmp_path):
    path = write_head(tmp_path / "head", "eagle3", target)
    with pytest.raises(ConfigError, match="num_speculative_tokens is missing"):
        prepare(default_manager(), {"model": str(path)}, info)


@pytest.mark.parametrize("late", [False, True], ids=["plain", "late"])
@pytest.mark.parametrize("free", [2, 8, 16])
def test_the_tree_ends_where_steps_grow_dear(target, head, plain, device, late, free):
    asked = device(free)
    with engine_of(target, {"model": head, **GROWN}, async_scheduling=late) as llm:
        assert asked[0] == (1, 1) and asked[-1] == (1, 31)
        core = llm.llm_engine.core
        assert core.drafting.needs.width == free - 1
        if late:
            assert core.steady.widths(1) == (0, free - 1)
        assert ids(llm) == plain
        values = {metric.name: metric.value for metric in llm.get_metrics()}
    per_draft = values["vllm:spec_decode_num_draft_tokens"] / values["vllm:spec_decode_num_drafts"]
    assert 0.6 * (free - 1) < per_draft <= free - 1
    assert not values["specdecode:proposer_failures"] and not values["specdecode:drafts_dropped_by_fault"]


def test_a_number_that_is_given_is_kept(target, head, device):
    asked = device(4)
    with engine_of(target, {"model": head, **GROWN, "num_speculative_tokens": 10}) as llm:
        assert not asked and llm.llm_engine.core.drafting.needs.width == 10


@pytest.mark.parametrize("late", [False, True], ids=["plain", "late"])
def test_on_this_machine_and_with_lengths_that_adapt(target, head, plain, late):
    config = {"model": head, **GROWN, "adaptive": True}
    with engine_of(target, config, async_scheduling=late) as llm:
        assert 1 <= llm.llm_engine.core.drafting.needs.width <= 30
        assert ids(llm) == plain


def test_a_table_of_lengths_goes_no_further(target, head, plain, device):
    device(4)
    config = {"model": head, **GROWN, "num_speculative_tokens_per_batch_size": [[1, 2, 20], [3, 8, 2]]}
    with engine_of(target, config, async_scheduling=True) as llm:
        assert llm.llm_engine.core.drafting.needs.width == 3
        assert ids(llm) == plain
