"""What a request gives back: text, stops, logprobs, sources, streaming, metrics."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specdecode import LLM, EngineArgs, LLMEngine, RequestOutputKind, SamplingParams, TokensPrompt
from specdecode.engine.detokenize import Detokenizer
from specdecode.engine.stop import StopString, find_stop
from specdecode.testing.tiny import tiny_checkpoint
from transformers import AutoTokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPT = TokensPrompt(prompt_token_ids=[101, 102, 103, 104] * 3)
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), output_scale=0.3)


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return AutoTokenizer.from_pretrained(checkpoint)


@pytest.fixture(scope="module")
def llm(checkpoint):
    return LLM(checkpoint, dtype="float32", max_model_len=128, speculative_config=NGRAM)


def one(llm, params, prompt=PROMPT):
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]


# -- text -----------------------------------------------------------------------------------------
@settings(max_examples=60, deadline=None)
@given(text=st.text(st.sampled_from("aé世🙂 \n"), min_size=1, max_size=12))
def test_streamed_characters_are_whole_and_add_up(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False).input_ids
    detokenizer = Detokenizer(tokenizer, [50], skip_special_tokens=True, spaces=True)
    for token in ids:
        before = detokenizer.text
        new = detokenizer.append(token)
        assert detokenizer.text[: len(before)] == before and len(detokenizer.text) == len(before) + new
        assert "\ufffd" not in detokenizer.text
    detokenizer.flush()
    assert detokenizer.text == text == tokenizer.decode(ids)


def test_an_output_that_ends_inside_a_character_shows_it_at_the_end(tokenizer):
    ids = tokenizer("🙂", add_special_tokens=False).input_ids[:2]
    detokenizer = Detokenizer(tokenizer, [], skip_special_tokens=True, spaces=True)
    assert [detokenizer.append(token) for token in ids] == [0, 0]
    detokenizer.flush()
    assert detokenizer.text == tokenizer.decode(ids)


def test_find_stop_looks_at_what_is_new_and_takes_the_first_to_begin():
    assert find_stop("abcd", 2, ["cd", "bcd"]) == StopString("bcd", 1, 4)
    assert find_stop("abcd", 1, ["ab"]) is None
    assert find_stop("abab", 1, ["ab"]) == StopString("ab", 2, 4)
    assert find_stop("abc", 0, ["abc"]) is None


def test_text_is_the_tokenizers_own(llm, tokenizer):
    output = one(llm, GREEDY)
    assert output.text == tokenizer.decode(output.token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_cuts_text_ids_and_logprobs(llm, include):
    full = one(llm, GREEDY.clone(logprobs=1))
    stop = full.text[6:8]
    end = full.text.index(stop) + len(stop)
    output = one(llm, GREEDY.clone(stop=[stop], logprobs=1, include_stop_str_in_output=include))
    assert output.finish_reason == "stop" and output.stop_reason == stop
    assert output.text == full.text[: end if include else end - len(stop)]
    assert list(output.token_ids) == list(full.token_ids[: len(output.token_ids)])
    assert len(output.logprobs) == len(output.token_sources) == len(output.token_ids) < len(full.token_ids)


@pytest.mark.parametrize("place", range(1, 9))
def test_a_stop_token_ends_at_each_place(llm, place):
    full = one(llm, GREEDY)
    token = full.token_ids[place]
    output = one(llm, GREEDY.clone(stop_token_ids=[token]))
    cut = list(full.token_ids).index(token) + 1
    assert list(output.token_ids) == list(full.token_ids[:cut])
    assert output.finish_reason == "stop" and output.stop_reason == token


def test_eos_ends_without_a_reason_and_ignore_eos_goes_on(llm, checkpoint):
    full = one(llm, GREEDY)
    eos = full.token_ids[5]
    with LLM(
        tiny_checkpoint(checkpoint.parent / "eos", output_scale=0.3, generation={"eos_token_id": [2, eos]}),
        dtype="float32",
        max_model_len=128,
        speculative_config=NGRAM,
    ) as other:
        cut = list(full.token_ids).index(eos) + 1
        output = one(other, GREEDY.clone(ignore_eos=False))
        assert list(output.token_ids) == list(full.token_ids[:cut])
        assert (output.finish_reason, output.stop_reason) == ("stop", None)
        assert one(other, GREEDY).token_ids == full.token_ids
        later = one(other, GREEDY.clone(ignore_eos=False, min_tokens=cut + 3))
        assert len(later.token_ids) >= cut + 3 and eos not in later.token_ids[: cut + 2]


@pytest.mark.parametrize("length", [1, 2, 5, 6, 7, 13])
def test_max_tokens_is_exact(llm, length):
    output = one(llm, GREEDY.clone(max_tokens=length, logprobs=0))
    assert len(output.token_ids) == len(output.logprobs) == length
    assert output.finish_reason == "length"


def test_the_context_ends_a_request(llm):
    output = one(llm, GREEDY.clone(max_tokens=None))
    assert len(output.token_ids) == 128 - 12 and output.finish_reason == "length"


# -- logprobs and sources -------------------------------------------------------------------------
def test_logprobs_are_the_targets_whatever_was_accepted(llm, checkpoint):
    with LLM(checkpoint, dtype="float32", max_model_len=128) as plain:
        want = one(plain, GREEDY.clone(logprobs=5))
    got = one(llm, GREEDY.clone(logprobs=5))
    assert got.token_ids == want.token_ids and "draft" in got.token_sources
    for token, ours, theirs in zip(got.token_ids, got.logprobs, want.logprobs, strict=True):
        assert list(ours) == list(theirs) and ours[token].rank == 1
        for key in ours:
            assert math.isclose(ours[key].logprob, theirs[key].logprob, abs_tol=1e-4)
    chosen = sum(row[token].logprob for token, row in zip(got.token_ids, got.logprobs, strict=True))
    assert math.isclose(got.cumulative_logprob, chosen, abs_tol=1e-4)


def test_token_sources_count_what_metrics_count(llm):
    result = llm.generate(PROMPT, GREEDY, use_tqdm=False)[0]
    assert result.outputs[0].token_sources.count("draft") == result.metrics.accepted > 0
    assert result.metrics.steps + result.metrics.accepted + 1 == len(result.outputs[0].token_ids)


def test_speculation_can_be_turned_off_for_a_request(llm):
    off = llm.generate(PROMPT, GREEDY.clone(speculation=False), use_tqdm=False)[0]
    on = llm.generate(PROMPT, GREEDY.clone(speculation=2), use_tqdm=False)[0]
    assert off.metrics.drafted == 0 and set(off.outputs[0].token_sources) == {"target"}
    assert 0 < on.metrics.drafted <= 2 * on.metrics.draft_steps
    assert off.outputs[0].token_ids == on.outputs[0].token_ids


# -- many -----------------------------------------------------------------------------------------
def test_outputs_come_in_the_order_of_their_prompts(llm):
    prompts = [TokensPrompt(prompt_token_ids=[60 + i] * (1 + i % 3)) for i in range(6)]
    params = [GREEDY.clone(max_tokens=12 - i) for i in range(6)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [12 - i for i in range(6)]
    assert [o.prompt_token_ids[0] for o in outputs] == [60 + i for i in range(6)]


def test_prompts_in_every_spelling(llm, tokenizer):
    ids = tokenizer("hello").input_ids
    outputs = [
        llm.generate("hello", GREEDY, use_tqdm=False),
        llm.generate(["hello"], GREEDY, use_tqdm=False),
        llm.generate({"prompt": "hello"}, GREEDY, use_tqdm=False),
        llm.generate(TokensPrompt(prompt_token_ids=ids), GREEDY, use_tqdm=False),
        llm.generate(None, GREEDY, ids, use_tqdm=False),
        llm.generate(prompt_token_ids=[ids], sampling_params=GREEDY, use_tqdm=False),
        llm.generate(TokensPrompt(prompt_token_ids=torch.tensor(ids)), GREEDY, use_tqdm=False),
    ]
    assert len({tuple(o[0].outputs[0].token_ids) for o in outputs}) == 1
    assert outputs[0][0].prompt == "hello"


def test_n_completions_differ_by_their_index_and_repeat_by_their_seed(llm):
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=12, n=3, ignore_eos=True)
    first, second = (llm.generate(PROMPT, params, use_tqdm=False)[0] for _ in range(2))
    assert [c.index for c in first.outputs] == [0, 1, 2]
    assert [c.token_ids for c in first.outputs] == [c.token_ids for c in second.outputs]
    assert len({tuple(c.token_ids) for c in first.outputs}) == 3
    single = one(llm, params.clone(n=1))
    assert single.token_ids == first.outputs[0].token_ids


def test_streamed_deltas_add_up_and_hold_stop_strings_back(checkpoint):
    engine = LLMEngine.from_engine_args(
        EngineArgs(model=str(checkpoint), dtype="float32", max_model_len=128, speculative_config=NGRAM)
    )
    params = GREEDY.clone(output_kind=RequestOutputKind.FINAL_ONLY)
    engine.add_request("whole", PROMPT, params)
    whole = next(o for _ in range(200) for o in engine.step() if o.finished).outputs[0]
    stop = whole.text[10:13]
    cut = whole.text.index(stop)
    engine.add_request("x", PROMPT, GREEDY.clone(output_kind=RequestOutputKind.DELTA, stop=[stop]))
    text, ids = "", []
    while engine.has_unfinished_requests():
        for output in engine.step():
            text += output.outputs[0].text
            ids += output.outputs[0].token_ids
            assert text == whole.text[: len(text)] and len(text) <= cut
    assert text == whole.text[:cut] and ids == whole.token_ids[: len(ids)]
    engine.shutdown()


# -- metrics --------------------------------------------------------------------------------------
def test_metrics_without_traffic_agree_and_snapshots_do_not_change(llm):
    one(llm, GREEDY)
    first, second = llm.get_metrics(), llm.get_metrics()
    read = [(m.name, m.value) for m in first]
    assert read == [(m.name, m.value) for m in second]
    one(llm, GREEDY)
    assert [(m.name, m.value) for m in first] == read
    after = {m.name: m.value for m in llm.get_metrics()}
    assert after["vllm:generation_tokens"] == dict(read)["vllm:generation_tokens"] + 24
    assert len(after["vllm:spec_decode_num_accepted_tokens_per_pos"]) == 4


def test_no_speculation_no_speculation_metrics(checkpoint):
    with LLM(checkpoint, max_model_len=64) as plain:
        assert not any("spec_decode" in metric.name for metric in plain.get_metrics())
