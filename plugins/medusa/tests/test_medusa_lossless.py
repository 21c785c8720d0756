"""Speculation changes no output: greedy and seeded, whatever the shape, the schedule and the cache."""

from __future__ import annotations

import pytest
from specdec_medusa.testing import write_heads
from specdecode.testing.lossless import (
    SCHEDULES,
    Engine,
    check_cold_and_warm,
    check_own_context,
    check_schedule,
    check_spell,
    check_told_laws,
    requests,
)

TREE = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0)]"
SHAPES = {
    "chain": {},
    "tree": {"speculative_token_tree": TREE},
    "published": {"speculative_token_tree": "mc_sim_7b_63", "num_speculative_tokens": 24},
}
HEADS = {
    "medusa-1": {},
    "head-only": {"layers": 2},
    "vllm": {"output": "shared", "draft_vocab": 200},
}
in_both_orders = pytest.mark.parametrize("order", ["plain", "late"])


@pytest.fixture(scope="module")
def heads(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    return {name: write_heads(folder / name, name, target, **options) for name, options in HEADS.items()}


@pytest.fixture(scope="module")
def plain(target):
    return Engine(target)(*requests())


def config(heads, head, shape, **more):
    return {"model": str(heads[head]), **SHAPES[shape], **more}


@in_both_orders
@pytest.mark.parametrize(
    ("head", "shape"),
    [
        ("medusa-1", "chain"),
        ("medusa-1", "tree"),
        ("head-only", "chain"),
        ("head-only", "published"),
        ("vllm", "chain"),
        ("vllm", "tree"),
    ],
)
def test_at_batch_8_and_1_cold_and_warm(target, heads, plain, head, shape, order):
    check_cold_and_warm(Engine(target, config(heads, head, shape), order), plain)


@in_both_orders
@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_chunked_preempted_and_uncached(target, heads, plain, shape, schedule, order):
    check_schedule(target, config(heads, "head-only", shape), plain, schedule, order)


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_after_a_spell_without_drafts(target, heads, plain, shape):
    check_spell(target, config(heads, "head-only", shape), plain)


@pytest.mark.parametrize(("rule", "shape"), [("standard", "chain"), ("standard", "tree"), ("block", "chain")])
def test_rules_that_weigh_laws_are_told_them(target, heads, plain, rule, shape):
    check_told_laws(target, config(heads, "head-only", shape), plain, rule)


def test_greedy_drafts_of_sampled_requests(target, heads, plain):
    engine = Engine(target, config(heads, "head-only", "chain", draft_sample_method="greedy"))
    assert engine(*requests()) == plain


def test_h14_no_drafts_behind_max_model_len(target, heads):
    check_own_context(target, config(heads, "head-only", "chain"))


def test_heads_in_the_targets_own_shards(target, plain, tmp_path):
    both = write_heads(tmp_path / "both", "medusa-2", target)
    engine = Engine(both, {"method": "medusa", "speculative_token_tree": TREE})
    assert engine(*requests()) == plain
    assert engine.accepted > 0
