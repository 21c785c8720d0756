"""Speculation changes no output: greedy and seeded, whatever the layers, the schedule and the cache."""

from __future__ import annotations

import pytest
from specdec_mtp.testing import write_modules, write_target
from specdecode import SamplingParams
from specdecode.testing.invariants import check_core
from specdecode.testing.lossless import Engine, requests
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
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 12, "max_num_seqs": 4},
        {"num_gpu_blocks_override": 30},
        {"enable_prefix_caching": False},
    ],
    ids=["chunked", "preempted", "uncached"],
)
def test_chunked_preempted_and_uncached(targets, name, options, order):
    target, plain = targets(name)
    engine = Engine(target, config(), order, **options)
    assert engine(*requests()) == plain
    assert engine.accepted > 0
    if "num_gpu_blocks_override" in options:
        assert engine.metric("vllm:num_preemptions") > 0
    check_core(engine.llm.llm_engine.core)


@pytest.mark.parametrize("name", ["mimo", "mimo3"])
def test_after_a_spell_without_drafts(targets, name):
    """With 3 requests and more nothing is drafted; what is left of them afterwards is."""
    target, plain = targets(name)
    engine = Engine(target, config(disable_by_batch_size=3))
    assert engine(*requests()) == plain
    assert engine.metric("vllm:spec_decode_num_drafts") > 0


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_rules_that_weigh_laws_are_told_them(targets, rule):
    target, plain = targets("mimo3")
    engine = Engine(target, config(rejection_sample_method=rule), max_num_batched_tokens=512)
    prompts, params = requests()
    outputs = engine(prompts, params)
    greedy = [index for index, p in enumerate(params) if p.temperature == 0]
    assert [outputs[i] for i in greedy] == [plain[i] for i in greedy]
    assert engine(prompts, params) == outputs  # the same drafts, the same seeds
    assert engine.metric("specdecode:drafts_dropped_by_fault") == 0


def test_greedy_drafts_of_sampled_requests(targets):
    target, plain = targets("mimo")
    engine = Engine(target, config(draft_sample_method="greedy"))
    assert engine(*requests()) == plain


def test_no_drafts_behind_the_context_that_is_set(targets):
    target, _ = targets("mimo")
    prompts, params = requests()
    prompts, params = [prompts[0], prompts[7]], [SamplingParams(temperature=0, max_tokens=50)] * 2
    wanted = Engine(target)(prompts, params)
    engine = Engine(target, config(max_model_len=16))
    assert engine(prompts, params) == wanted
    # The prompt of 3 tokens is drafted for until it has 16; the one of 38 never is.
    assert 0 < engine.metric("vllm:spec_decode_num_drafts") <= 12


@in_both_orders
@pytest.mark.parametrize("layout", ["mimo", "speculators"])
def test_layers_of_a_directory_of_their_own(layout, order, tmp_path):
    target = tiny_checkpoint(tmp_path / "target", "llama", output_scale=0.2, max_position_embeddings=256)
    path = write_modules(tmp_path / "layers", target, layout, modules=2)
    engine = Engine(target, {"model": str(path)}, order)
    assert engine(*requests()) == Engine(target)(*requests())
    assert engine.accepted > 0
