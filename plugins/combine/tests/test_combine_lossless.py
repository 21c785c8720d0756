"""Combining changes no output: greedy and seeded, on either side, whatever the schedule and the cache."""

from __future__ import annotations

import numpy as np
import pytest
from specdecode import SamplingParams
from specdecode.testing.invariants import check_core

LOOKUP = {"num_speculative_tokens": 4, "prompt_lookup_min": 1}
NGRAM = {"method": "ngram", **LOOKUP}
ITSELF = {"method": "scripted-self-draft", "num_speculative_tokens": 2}  # always right, so that others follow
ON_DEVICE = {"method": "lookup-on-device", **LOOKUP}
TREE = {"speculative_token_tree": "[(0,), (1,), (0, 0), (0, 1)]", "num_speculative_tokens": None}
SUFFIX = {"method": "suffix", "suffix_decoding_min_token_prob": 0.0}
LOOKUPS = {"method": "cascade", "proposers": [NGRAM, NGRAM]}
#: Name -> method and its keys, given the head's; those named so work on the device alone.
COMBINATIONS = {
    "cascade": lambda head: ("cascade", {"proposers": [NGRAM, head], "min_score": 0.7}),
    "cascade-device": lambda head: ("cascade", {"proposers": [ON_DEVICE, head], "min_score": 0.7}),
    "cascade-tree": lambda head: ("cascade", {"proposers": [NGRAM, {**head, **TREE}]}),
    "extend": lambda head: ("extend", {"proposers": [ITSELF, NGRAM]}),
    "extend-device": lambda head: ("extend", {"proposers": [ITSELF, ON_DEVICE]}),
    "auto": lambda head: ("auto", {"proposers": [NGRAM, head], "trial_steps": 8}),
    "auto-device": lambda head: ("auto", {"proposers": [ON_DEVICE, head], "trial_steps": 8}),
    "cascade-suffix": lambda head: ("cascade", {"proposers": [SUFFIX, head], "min_score": 0.7}),
    "extend-suffix": lambda head: ("extend", {"proposers": [ITSELF, SUFFIX]}),
    "nested": lambda head: (
        "cascade",
        {"proposers": [{"method": "extend", "proposers": [head, LOOKUPS]}, NGRAM]},
    ),
}  # fmt: skip
in_both_orders = pytest.mark.parametrize("order", ["plain", "late"])
KINDS = [
    {"temperature": 0},
    {"temperature": 0.9, "top_p": 0.9, "seed": 5},
    {"temperature": 1.0, "seed": 6},
    {"temperature": 0, "presence_penalty": 0.6},
    {"temperature": 0.5, "top_k": 5, "seed": 2**40},
    {"temperature": 0, "min_tokens": 9},
    {"temperature": 0.8, "seed": 7, "repetition_penalty": 1.2},
    {"temperature": 0.3, "min_p": 0.02, "seed": -7},
]


def requests():
    """Prompts that repeat themselves, so that lookups find something."""
    rng = np.random.default_rng(0)
    prompts = [(rng.integers(3, 300, 3 + 2 * index).tolist() * 2)[: 4 + 4 * index] for index in range(8)]
    return prompts, [SamplingParams(max_tokens=16 + 2 * i, **KINDS[i]) for i in range(8)]


def config_of(name, eagle, **more):
    if name.endswith("-suffix"):
        pytest.importorskip("specdec_suffix")
    method, keys = COMBINATIONS[name](eagle)
    return {"method": method, **keys, **more}


def per_child(found, key):
    return [value for name, value in found.items() if name.count(".") == 3 and name.endswith(f".{key}")]


@pytest.fixture(scope="module")
def plain(llm_of, run):
    return run(llm_of(None), *requests())


@in_both_orders
@pytest.mark.parametrize("name", COMBINATIONS)
def test_at_batch_8_and_1_cold_and_warm(llm_of, run, metrics, eagle, plain, name, order):
    llm, (prompts, params) = llm_of(config_of(name, eagle), async_scheduling=order == "late"), requests()
    assert run(llm, prompts, params) == plain
    assert run(llm, prompts, params) == plain
    for index in (0, 2, 7):
        assert run(llm, prompts[index : index + 1], params[index : index + 1]) == plain[index : index + 1]
    found = metrics(llm)
    assert found["specdecode:proposer_failures"] == found["specdecode:drafts_dropped_by_fault"] == 0
    drafts, accepted = per_child(found, "draft_tokens"), per_child(found, "accepted_tokens")
    assert all(a <= d for a, d in zip(accepted, drafts, strict=True)) and sum(accepted) > 0
    if name != "nested":
        assert min(drafts) > 0  # each of them was made use of
    check_core(llm.llm_engine.core)


@in_both_orders
@pytest.mark.parametrize("name", ["cascade", "extend-device", "extend-suffix", "auto"])
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 12, "max_num_seqs": 4},
        {"num_gpu_blocks_override": 30},
        {"enable_prefix_caching": False},
    ],
    ids=["chunked", "preempted", "uncached"],
)
def test_chunked_preempted_and_uncached(llm_of, run, metrics, eagle, plain, name, options, order):
    llm = llm_of(config_of(name, eagle), async_scheduling=order == "late", **options)
    assert run(llm, *requests()) == plain
    found = metrics(llm)
    assert found["vllm:spec_decode_num_accepted_tokens"] > 0 and found["specdecode:proposer_failures"] == 0
    if "num_gpu_blocks_override" in options:
        assert found["vllm:num_preemptions"] > 0
    check_core(llm.llm_engine.core)


@pytest.mark.parametrize("name", ["cascade", "cascade-device", "extend", "auto"])
def test_after_a_spell_without_drafts(llm_of, run, metrics, eagle, plain, name):
    """With 3 requests and more nothing is drafted; what is left of them afterwards is."""
    llm = llm_of(config_of(name, eagle, disable_by_batch_size=3))
    assert run(llm, *requests()) == plain
    assert metrics(llm)["vllm:spec_decode_num_drafts"] > 0


@pytest.mark.parametrize("rule", ["standard", "block"])
@pytest.mark.parametrize("name", ["cascade", "extend", "auto"])
def test_greedy_outputs_under_rules_that_weigh_laws(llm_of, run, metrics, eagle, plain, name, rule):
    llm = llm_of(config_of(name, eagle, rejection_sample_method=rule), max_num_batched_tokens=512)
    outputs = run(llm, *requests())
    greedy = [index for index, kind in enumerate(KINDS) if kind["temperature"] == 0]
    assert [outputs[index] for index in greedy] == [plain[index] for index in greedy]
    found = metrics(llm)
    assert found["specdecode:proposer_failures"] == found["specdecode:drafts_dropped_by_fault"] == 0


@in_both_orders
@pytest.mark.parametrize("name", ["cascade", "cascade-device", "extend", "extend-device"])
def test_what_the_children_are_told_to_have_given_is_what_core_counts(
    llm_of, run, metrics, eagle, name, order
):
    """One request, so that rows keep their places: what children had accepted adds up, on the device too."""
    llm = llm_of(config_of(name, eagle), async_scheduling=order == "late")
    prompt, params = [5, 6, 7, 8] * 5, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    run(llm, [prompt], [params])
    found = metrics(llm)
    counted = found["vllm:spec_decode_num_accepted_tokens"] + found["specdecode:discarded_tokens"]
    assert sum(per_child(found, "accepted_tokens")) == counted > 5
    assert sum(per_child(found, "draft_tokens")) >= found["vllm:spec_decode_num_draft_tokens"]
