"""Speculation changes no output: greedy and seeded, whatever the shape, the schedule and the cache."""

from __future__ import annotations

import pytest
from specdec_mlp.testing import write_speculator
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
    check_cold_and_warm(Engine(target, config(heads, head, shape), order), plain)


@in_both_orders
@pytest.mark.parametrize("shape", ["chain", "grown"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_chunked_preempted_and_uncached(target, heads, plain, shape, schedule, order):
    check_schedule(target, config(heads, "tied", shape), plain, schedule, order)


@pytest.mark.parametrize("shape", ["chain", "grown"])
def test_after_a_spell_without_drafts(target, heads, plain, shape):
    check_spell(target, config(heads, "tied", shape), plain)


@pytest.mark.parametrize(
    ("rule", "shape"), [("standard", "chain"), ("standard", "fixed"), ("block", "chain")]
)
def test_rules_that_weigh_laws_are_told_them(target, heads, plain, rule, shape):
    check_told_laws(target, config(heads, "tied", shape), plain, rule)


def test_greedy_drafts_of_sampled_requests(target, heads, plain):
    engine = Engine(target, config(heads, "tied", "chain", draft_sample_method="greedy"))
    assert engine(*requests()) == plain


def test_h14_no_drafts_behind_max_model_len(target, heads):
    check_own_context(target, config(heads, "tied", "chain"))
