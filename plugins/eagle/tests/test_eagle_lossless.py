"""Speculation changes no output: greedy and seeded, whatever the shape, the schedule and the cache."""

from __future__ import annotations

import pytest
import torch
from specdec_eagle.head import EagleHead
from specdec_eagle.testing import write_head
from specdecode import SamplingParams
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
    "chain": {"num_speculative_tokens": 4},
    "fixed": {"speculative_token_tree": TREE},
    "grown": {"num_speculative_tokens": 10, "tree_top_k": 3, "tree_depth": 4},
}
HEADS = {
    "eagle": ("eagle", {}),
    "eagle3": ("eagle3", {}),
    "eagle3-reduced": ("eagle3-speculators", {"draft_vocab": 150, "norm_before_residual": True}),
}
in_both_orders = pytest.mark.parametrize("order", ["plain", "late"])


@pytest.fixture(scope="module")
def heads(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    return {
        name: write_head(folder / name, layout, target, **options)
        for name, (layout, options) in HEADS.items()
    }


@pytest.fixture(scope="module")
def plain(target):
    return Engine(target)(*requests())


def config(heads, head, shape, **more):
    return {"model": str(heads[head]), **SHAPES[shape], **more}


@in_both_orders
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("head", HEADS)
def test_at_batch_8_and_1_cold_and_warm(target, heads, plain, head, shape, order):
    check_cold_and_warm(Engine(target, config(heads, head, shape), order), plain)


@in_both_orders
@pytest.mark.parametrize(
    ("head", "shape"),
    [
        ("eagle", "chain"),
        ("eagle", "grown"),
        ("eagle3", "chain"),
        ("eagle3", "fixed"),
        ("eagle3-reduced", "grown"),
    ],
)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_chunked_preempted_and_uncached(target, heads, plain, head, shape, schedule, order):
    check_schedule(target, config(heads, head, shape), plain, schedule, order)


@in_both_orders
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("head", ["eagle", "eagle3"])
def test_after_a_spell_without_drafts(target, heads, plain, head, shape, order):
    check_spell(target, config(heads, head, shape), plain, order)


@pytest.mark.parametrize(("head", "shape"), [("eagle", "chain"), ("eagle3", "fixed"), ("eagle3", "grown")])
def test_drafts_behind_a_spell_are_those_of_a_request_without_one(target, heads, head, shape):
    """What was fed meanwhile was true. Blocks begin elsewhere at first, and together again further on."""
    spells = config(heads, head, shape, disable_by_batch_size=3)
    long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    short = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    others = requests(4)[0][1:]

    def sources(prompt, *neighbours):
        inputs = [{"prompt_token_ids": own} for own in (prompt, *neighbours)]
        params = [long, *[short] * len(neighbours)]
        output = Engine(target, spells).llm.generate(inputs, params, use_tqdm=False)[0].outputs[0]
        return list(output.token_sources)

    prompts = ([first, first + 1, first + 2] for first in range(20, 280, 13))
    prompt, alone = next((p, own) for p in prompts if "draft" in (own := sources(p))[30:50])
    beside = sources(prompt, *others)
    assert "draft" not in beside[:8]
    starts = [{at for at, source in enumerate(own) if source == "target"} for own in (alone, beside)]
    common = min(at for at in starts[0] & starts[1] if at > 12) + 1
    assert common < 30 and alone[common:] == beside[common:]


@pytest.mark.parametrize("fused", ["0", "1"])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("layout", ["eagle", "eagle3"])
def test_who_may_draft_nothing_is_fed_keys_and_values_alone(
    target, tmp_path, monkeypatch, layout, layers, fused
):
    """The same keys and values as behind the whole head, of which nothing more is computed."""
    monkeypatch.setenv("SPECDECODE_FUSED", fused)
    forward, same = EagleHead.forward, []

    def checked(self, ids, feature, positions, meta, caches, *, wanted=None, **more):
        if wanted is None or len(wanted):
            return forward(self, ids, feature, positions, meta, caches, wanted=wanted, **more)
        whole = [tuple(half.clone() for half in cache) for cache in caches]
        forward(self, ids, feature, positions, meta, whole, **more)
        last, mlp = self.layers[-1], self.layers[-1].mlp
        last.mlp = None
        made = forward(self, ids, feature, positions, meta, caches, wanted=wanted, **more)
        last.mlp = mlp
        pairs = [pair for two in zip(caches, whole, strict=True) for pair in zip(*two, strict=True)]
        same.append(len(ids) and all(torch.equal(own, other) for own, other in pairs))
        return made

    monkeypatch.setattr(EagleHead, "forward", checked)
    path = write_head(tmp_path / "head", layout, target, layers=layers)
    spells = {"model": str(path), "num_speculative_tokens": 3, "disable_by_batch_size": 3}
    Engine(target, spells)(*requests())
    assert len(same) > 3 and all(same)


@pytest.mark.parametrize("shape", ["chain", "fixed"])
@pytest.mark.parametrize("rule", ["standard", "block"])
def test_rules_that_weigh_laws_are_told_them(target, heads, plain, shape, rule):
    if (rule, shape) == ("block", "fixed"):
        pytest.skip("core refuses a tree under block")
    check_told_laws(target, config(heads, "eagle3-reduced", shape), plain, rule)


def test_greedy_drafts_of_sampled_requests(target, heads, plain):
    engine = Engine(target, config(heads, "eagle", "chain", draft_sample_method="greedy"))
    assert engine(*requests()) == plain


def test_h14_no_drafts_behind_the_heads_own_context(target, heads):
    check_own_context(target, config(heads, "eagle", "chain"))


def test_a_chain_ends_where_confidence_falls(target, heads, plain):
    sure = Engine(target, config(heads, "eagle3", "chain"))
    unsure = Engine(target, config(heads, "eagle3", "chain", confidence_threshold=0.05))
    assert sure(*requests()) == unsure(*requests()) == plain
    name = "vllm:spec_decode_num_draft_tokens"
    drafts = unsure.metric("vllm:spec_decode_num_drafts")
    assert drafts < unsure.metric(name) < sure.metric(name)  # at least one token, often no more


@in_both_orders
@pytest.mark.parametrize("head", ["eagle3", "eagle3-reduced"])
def test_where_confidence_falls_drafting_ends_on_a_cpu(target, heads, plain, monkeypatch, head, order):
    """The drafts are those of all steps, of which a GPU leaves out none; fewer are computed."""
    from specdec_eagle import proposer

    forward, calls = proposer.EagleProposer.propose, []

    def propose(self, step, out):
        inner, count = self._head.forward, 0

        def counted(*args, **kwargs):
            nonlocal count
            count += 1
            return inner(*args, **kwargs)

        self._head.forward = counted
        try:
            forward(self, step, out)
        finally:
            del self._head.forward
        calls.append((count, int(out.lens.max())))
        most = step.budget.minimum(step.room).tolist()
        for scores, length, limit in zip(out.score.tolist(), out.lens.tolist(), most, strict=True):
            assert all(score >= 0.05 for score in scores[: max(0, length - 1)])
            assert length == limit or scores[length - 1] < 0.05

    monkeypatch.setattr(proposer.EagleProposer, "propose", propose)
    made = []
    for ends in (True, False):
        calls.clear()
        with monkeypatch.context() as patch:
            if not ends:
                patch.setattr(proposer, "all_drafted", lambda lens, drafted: False)
            engine = Engine(target, config(heads, head, "chain", confidence_threshold=0.05), order)
            assert engine(*requests()) == plain
        made.append([engine.metric(f"vllm:spec_decode_num_{name}") for name in ("draft_tokens", "drafts")])
        if ends:  # one for the feed, one for each token behind the first
            assert all(count == max(1, most) for count, most in calls)
            assert {most for _, most in calls} > {0, 1}
        else:
            assert max(count for count, most in calls if most == 1) == 4
    assert made[0] == made[1]
