"""Speculation changes no output: greedy and seeded, whatever the shape, the schedule and the cache."""

from __future__ import annotations

import pytest
from specdec_mlp.testing import write_speculator
from specdecode import SamplingParams
from specdecode.testing.invariants import check_core
from specdecode.testing.lossless import Engine, requests

TREE = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0)]"
SHAPES = {
    "chain": {},
    "fixed": {"speculative_token_tree": TREE},
    "grown": {"num_speculative_tokens": 10, "tree_top_k": 3},
}
HEADS = {
    "untied": {},
    "tied": {"tied": True, "scale_input": True},
}
in_both_orders = pytest.mark.parametrize("order", ["plain", "late"])


@pytest.fixture(scope="module")
def heads(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    return {name: write_speculator(folder / name, target, **options) for name, options in HEADS.items()}


@pytest.fixture(scope="module")
def plain(target):
    return Engine(target)(*requests())


def config(heads, head, shape, **more):
    return {"model": str(heads[head]), **SHAPES[shape], **more}


@in_both_orders
@pytest.mark.parametrize(
    ("head", "shape"),
    [
        ("untied", "chain"),
        ("untied", "grown"),
        ("tied", "chain"),
        ("tied", "fixed"),
        ("tied", "grown"),
    ],
)
def test_at_batch_8_and_1_cold_and_warm(target, heads, plain, head, shape, order):
    engine, (prompts, params) = Engine(target, config(heads, head, shape), order), requests()
    assert engine(prompts, params) == plain
    assert engine(prompts, params) == plain  # with what the prefix cache holds
    for index in (0, 2, 7):
        assert engine(prompts[index : index + 1], params[index : index + 1]) == plain[index : index + 1]
    assert engine.accepted > 0
    check_core(engine.llm.llm_engine.core)


@in_both_orders
@pytest.mark.parametrize("shape", ["chain", "grown"])
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 12, "max_num_seqs": 4},
        {"num_gpu_blocks_override": 30},
        {"enable_prefix_caching": False},
    ],
    ids=["chunked", "preempted", "uncached"],
)
def test_chunked_preempted_and_uncached(target, heads, plain, shape, options, order):
    engine = Engine(target, config(heads, "tied", shape), order, **options)
    assert engine(*requests()) == plain
    assert engine.accepted > 0
    if "num_gpu_blocks_override" in options:
        assert engine.metric("vllm:num_preemptions") > 0
    check_core(engine.llm.llm_engine.core)


@pytest.mark.parametrize("shape", ["chain", "grown"])
def test_after_a_spell_without_drafts(target, heads, plain, shape):
    """With 3 requests and more nothing is drafted; what is left of them afterwards is."""
    engine = Engine(target, config(heads, "tied", shape, disable_by_batch_size=3))
    assert engine(*requests()) == plain
    assert engine.metric("vllm:spec_decode_num_drafts") > 0


@pytest.mark.parametrize(
    ("rule", "shape"), [("standard", "chain"), ("standard", "fixed"), ("block", "chain")]
)
def test_rules_that_weigh_laws_are_told_them(target, heads, plain, rule, shape):
    engine = Engine(
        target,
        config(heads, "tied", shape, rejection_sample_method=rule),
        max_num_batched_tokens=512,
    )
    prompts, params = requests()
    outputs = engine(prompts, params)
    greedy = [index for index, p in enumerate(params) if p.temperature == 0]
    assert [outputs[i] for i in greedy] == [plain[i] for i in greedy]
    assert engine(prompts, params) == outputs  # the same drafts, the same seeds
    assert engine.metric("specdecode:drafts_dropped_by_fault") == 0


def test_greedy_drafts_of_sampled_requests(target, heads, plain):
    engine = Engine(target, config(heads, "tied", "chain", draft_sample_method="greedy"))
    assert engine(*requests()) == plain


def test_h14_no_drafts_behind_max_model_len(target, heads):
    prompts, params = requests()
    prompts, params = [prompts[0], prompts[7]], [SamplingParams(temperature=0, max_tokens=50)] * 2
    wanted = Engine(target)(prompts, params)
    engine = Engine(target, config(heads, "tied", "chain", max_model_len=16))
    assert engine(prompts, params) == wanted
    # The prompt of 3 tokens is drafted for until it has 16; the one of 38 never is.
    assert 0 < engine.metric("vllm:spec_decode_num_drafts") <= 12
