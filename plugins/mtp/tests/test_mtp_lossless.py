"""Speculation changes no output: greedy and seeded, whatever the layers, the schedule and the cache."""

from __future__ import annotations

import pytest
from specdec_mtp.testing import write_modules, write_target
from specdecode.testing.invariants import check_core
from specdecode.testing.lossless import (
    SCHEDULES,
    Engine,
    check_own_context,
    check_schedule,
    check_spell,
    check_told_laws,
    requests,
)
from specdecode.testing.tiny import tiny_checkpoint

#: Name -> layout of the target, its modules.
TARGETS = {
    "mimo": ("mimo", 1),
    "mimo3": ("mimo", 3),
    "glm": ("glm4_moe", 2),
    "deepseek": ("deepseek_v3", 1),
}
in_both_orders = pytest.mark.parametrize("order", ["plain", "late"])


class Targets:
    """Checkpoints and their outputs without speculation, each made when first asked for."""

    def __init__(self, folder):
        self._folder = folder
        self._made = {}

    def __call__(self, name):
        if name not in self._made:
            layout, modules = TARGETS[name]
            path = write_target(self._folder / name, layout, modules=modules)
            self._made[name] = path, Engine(path)(*requests())
        return self._made[name]


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    return Targets(tmp_path_factory.mktemp("targets"))


def config(**more):
    return {"method": "mtp", "num_speculative_tokens": 4, **more}


@in_both_orders
@pytest.mark.parametrize("name", TARGETS)
def test_at_batch_8_and_1_cold_and_warm(targets, name, order):
    target, plain = targets(name)
    engine, (prompts, params) = Engine(target, config(), order), requests()
    assert engine(prompts, params) == plain
    accepted = engine.accepted
    assert engine(prompts, params) == plain  # what the prefix cache holds came with draft entries
    assert engine.accepted >= 2 * accepted > 0  # as true as those that were fed
    for index in (0, 2, 7):
        assert engine(prompts[index : index + 1], params[index : index + 1]) == plain[index : index + 1]
    check_core(engine.llm.llm_engine.core)


@in_both_orders
@pytest.mark.parametrize("name", ["mimo", "mimo3", "glm"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_chunked_preempted_and_uncached(targets, name, schedule, order):
    target, plain = targets(name)
    check_schedule(target, config(), plain, schedule, order)


@pytest.mark.parametrize("name", ["mimo", "mimo3"])
def test_after_a_spell_without_drafts(targets, name):
    target, plain = targets(name)
    check_spell(target, config(), plain)


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_rules_that_weigh_laws_are_told_them(targets, rule):
    target, plain = targets("mimo3")
    check_told_laws(target, config(), plain, rule)


def test_greedy_drafts_of_sampled_requests(targets):
    target, plain = targets("mimo")
    engine = Engine(target, config(draft_sample_method="greedy"))
    assert engine(*requests()) == plain


def test_no_drafts_behind_the_context_that_is_set(targets):
    check_own_context(targets("mimo")[0], config())


@in_both_orders
@pytest.mark.parametrize("layout", ["mimo", "speculators"])
def test_layers_of_a_directory_of_their_own(layout, order, tmp_path):
    target = tiny_checkpoint(tmp_path / "target", "llama", output_scale=0.2, max_position_embeddings=256)
    path = write_modules(tmp_path / "layers", target, layout, modules=2)
    engine = Engine(target, {"model": str(path)}, order)
    assert engine(*requests()) == Engine(target)(*requests())
    assert engine.accepted > 0
