"""Who drafts, what the second is shown, and what a child that fails costs."""

from __future__ import annotations

import logging

import pytest
from specdecode import SamplingParams
from specdecode.testing.invariants import check_core
from specdecode.testing.recording import recording

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = [[5, 6, 7, 8] * 3, [11, 40, 12]]
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def plain(llm_of, run):
    return run(llm_of(None), PROMPTS, [GREEDY] * 2)


@pytest.fixture(scope="module")
def oracle(plain):
    """``oracle(count, texts)``: a child that knows what the target says to some of the prompts."""
    whole = [[*prompt, *output] for prompt, output in zip(PROMPTS, plain, strict=True)]

    def make(count, texts=(0, 1), **keys):
        return {
            "method": keys.pop("method", "scripted-oracle"),
            "num_speculative_tokens": count,
            "texts": [whole[text] for text in texts],
            **keys,
        }

    return make


def accepted(found, method):
    name = f"{method}."
    return [
        value for key, value in found.items() if key.startswith(name) and key.endswith(".accepted_tokens")
    ]


def test_a_cascade_takes_row_by_row_the_first_that_drafts(llm_of, run, metrics, plain, oracle):
    """The first knows one prompt, the second both; the third is never needed."""
    liar = {"method": "scripted-liar", "num_speculative_tokens": 2}
    llm = llm_of({"method": "cascade", "proposers": [oracle(2, [1]), oracle(3), liar]})
    assert run(llm, PROMPTS, [GREEDY] * 2) == plain
    found = metrics(llm)
    assert found["vllm:spec_decode_num_accepted_tokens"] == found["vllm:spec_decode_num_draft_tokens"]
    assert accepted(found, "cascade") == [15, 17, 0]  # of 23: 2 in 3, and 3 in 4
    assert found["cascade.2.scripted-liar.drafts"] == 0


@pytest.mark.parametrize(("min_score", "first"), [(0.0, 1.0), (0.9, 0.5), (4.1, 0.0)])
def test_a_cascade_goes_by_the_score(llm_of, run, metrics, plain, oracle, min_score, first):
    """Prompt lookup is sure of a long match, and less of a short one."""
    llm = llm_of({"method": "cascade", "proposers": [NGRAM, oracle(3)], "min_score": min_score})
    assert run(llm, PROMPTS, [GREEDY] * 2) == plain
    found = metrics(llm)
    share = found["cascade.0.ngram.drafts"] / max(found["cascade.0.ngram.hits"], 1)
    assert found["cascade.0.ngram.hits"] > 0
    assert share == first if first in (0.0, 1.0) else 0 < share < 1


def test_a_later_child_is_not_asked_for_what_an_elder_took(llm_of, run, oracle):
    """It is fed nonetheless, with a budget of 0, and knows it before it begins."""
    recorder = {"method": "scripted-recorder", "inner": NGRAM, "recording": "combine-later"}
    record = recording("combine-later")
    record.clear()
    run(llm_of({"method": "cascade", "proposers": [oracle(2, [0]), recorder]}), PROMPTS, [GREEDY] * 2)
    told = [draft for draft in record.drafts if list(draft.history[:4]) == [5, 6, 7, 8]]
    other = [draft for draft in record.drafts if list(draft.history[:3]) == [11, 40, 12]]
    assert told and other and len({len(draft.history) for draft in told}) > 5
    assert {draft.budget for draft in told} == {0} and max(draft.budget for draft in other) == 4


def test_an_extension_goes_on_behind_the_first(llm_of, run, metrics, plain):
    """The first is right, and what it drafts makes a text that repeats itself."""
    itself = {"method": "scripted-self-draft", "num_speculative_tokens": 2}
    llm = llm_of({"method": "extend", "proposers": [itself, NGRAM]})
    alone = llm_of({"method": "cascade", "proposers": [itself, NGRAM]})
    assert run(llm, PROMPTS, [GREEDY] * 2) == run(alone, PROMPTS, [GREEDY] * 2) == plain
    found = metrics(llm)
    assert found["extend.0.scripted-self-draft.accepted_tokens"] > 0
    assert found["extend.1.ngram.draft_tokens"] > found["extend.1.ngram.accepted_tokens"] > 0
    steps = [metrics(each)["specdecode:decode_steps"] for each in (llm, alone)]
    assert steps[0] < steps[1]


# -- faults ----------------------------------------------------------------------------------------
def test_a_child_that_raises_costs_its_own_drafts_alone(
    llm_of, run, metrics, plain, oracle, caplog, monkeypatch
):
    monkeypatch.delenv("SPECDECODE_STRICT_PLUGINS", raising=False)
    faulty = oracle(3, method="scripted-faulty", fault="raises-half-way", every=2)
    llm = llm_of({"method": "cascade", "proposers": [faulty, oracle(2)]})
    with caplog.at_level(logging.ERROR):
        assert run(llm, PROMPTS, [GREEDY] * 2) == plain
    found = metrics(llm)
    assert found["specdecode:proposer_failures"] == 0 and min(accepted(found, "cascade")) > 0
    assert found["cascade.0.scripted-faulty.failures"] > 1
    assert "proposers[0.scripted-faulty] failed" in caplog.text
    assert found["vllm:spec_decode_num_accepted_tokens"] == found["vllm:spec_decode_num_draft_tokens"]
    check_core(llm.llm_engine.core)


def test_a_child_that_always_raises_is_not_asked_again(llm_of, run, metrics, plain, oracle, monkeypatch):
    monkeypatch.delenv("SPECDECODE_STRICT_PLUGINS", raising=False)
    faulty = oracle(3, method="scripted-faulty", fault="raises")
    llm = llm_of({"method": "cascade", "proposers": [faulty, oracle(2)]})
    assert run(llm, PROMPTS, [GREEDY] * 2) == plain
    found = metrics(llm)
    assert found["cascade.0.scripted-faulty.failures"] == 5
    assert accepted(found, "cascade")[0] == 0 < accepted(found, "cascade")[1]


def test_a_child_with_draft_layers_that_raises_costs_the_step_and_its_state_is_made_up_for(
    llm_of, run, metrics, plain, eagle, monkeypatch
):
    monkeypatch.delenv("SPECDECODE_STRICT_PLUGINS", raising=False)
    flaky = {"method": "scripted-flaky", "inner": eagle, "every": 4}
    llm = llm_of({"method": "cascade", "proposers": [NGRAM, flaky]})
    assert run(llm, PROMPTS, [GREEDY] * 2) == plain
    found = metrics(llm)
    assert found["specdecode:proposer_failures"] > 1 and found["cascade.1.scripted-flaky.failures"] == 0
    assert found["vllm:spec_decode_num_drafts"] > 0
    check_core(llm.llm_engine.core)


def test_strict_raises(manager, plain, oracle, target):
    from specdecode.api.args import EngineArgs
    from specdecode.api.engine import LLMEngine
    from specdecode.plugins import PluginManager
    from specdecode.testing import scripted

    strict = PluginManager(strict=True)
    scripted.install(strict)
    faulty = oracle(3, method="scripted-faulty", fault="raises")
    args = EngineArgs(
        model=str(target), dtype="float32", device="cpu", max_model_len=96, num_gpu_blocks_override=100,
        skip_tokenizer_init=True, async_scheduling=False,
        speculative_config={"method": "cascade", "proposers": [faulty, oracle(2)]},
    )  # fmt: skip
    engine = LLMEngine(args, strict)
    engine.add_request("one", {"prompt_token_ids": PROMPTS[0]}, GREEDY)
    with pytest.raises(Exception, match="raised before drafting"):
        while engine.has_unfinished_requests():
            engine.step()


@pytest.mark.parametrize(
    "fault", ["id-too-high", "cyclic-parents", "more-than-width", "negative-lens", "nan-scores"]
)
def test_what_a_child_drafts_by_fault_is_dropped(llm_of, run, metrics, plain, oracle, fault):
    faulty = oracle(3, method="scripted-faulty", fault=fault)
    llm = llm_of({"method": "cascade", "proposers": [faulty, oracle(2)]})
    assert run(llm, PROMPTS, [GREEDY] * 2) == plain
    found = metrics(llm)
    assert found["specdecode:proposer_failures"] == 0
    # What is cut for its ids is the core's to count; a length below 0 leaves the row to the next child.
    assert (found["specdecode:drafts_dropped_by_fault"] > 0) == (fault in ("id-too-high", "cyclic-parents"))
    check_core(llm.llm_engine.core)


@pytest.mark.parametrize("hook", ["on-add", "on-commit", "on-finish"])
def test_every_child_is_told_though_one_raises(llm_of, run, plain, oracle, hook, monkeypatch):
    monkeypatch.delenv("SPECDECODE_STRICT_PLUGINS", raising=False)
    faulty = oracle(3, method="scripted-faulty", fault=f"raises-in-{hook}")
    recorder = {"method": "scripted-recorder", "inner": oracle(2), "recording": f"combine-{hook}"}
    record = recording(f"combine-{hook}")
    record.clear()
    llm = llm_of({"method": "cascade", "proposers": [faulty, recorder]})
    assert run(llm, PROMPTS, [GREEDY] * 2) == plain
    kinds = [event.kind for event in record.events]
    assert kinds.count("add") == kinds.count("finish") == 2 and "commit" in kinds and not record.alive
