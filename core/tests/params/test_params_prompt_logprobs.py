"""prompt_logprobs: the model's log-probabilities of the prompt, however the prompt was computed."""

from __future__ import annotations

import pytest
import torch
from specdecode import LLMEngine, RequestOutputKind, SamplingParams, TokensPrompt
from specdecode.contract import ConfigError
from transformers import AutoModelForCausalLM

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SPECULATION = [None, "ngram", "scripted-self-draft", "scripted-eagle"]


def prompt(length: int, seed: int = 0) -> TokensPrompt:
    ids = torch.randint(3, 300, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return TokensPrompt(prompt_token_ids=ids)


@pytest.fixture(scope="module")
def logprobs_of(checkpoint):
    """``logprobs_of(ids)``: ``[T, vocab]`` by transformers."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)

    @torch.inference_mode()
    def logprobs_of(ids: list[int]) -> torch.Tensor:
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)

    return logprobs_of


def check(output, num: int, logprobs_of) -> None:
    """``output.prompt_logprobs`` are what transformers gives."""
    ids = output.prompt_token_ids
    first, *rows = output.prompt_logprobs
    assert first is None and len(rows) == len(ids) - 1
    for token, row, want in zip(ids[1:], rows, logprobs_of(list(ids)), strict=False):
        assert next(iter(row)) == token
        likeliest = want.topk(num).indices.tolist() if num >= 0 else range(300)
        assert set(row) == {token, *likeliest}
        for key, entry in row.items():
            assert entry.logprob == pytest.approx(float(want[key]), abs=1e-4)
        ranks = (want > want[token]).sum() + 1
        assert row[token].rank == int(ranks)
        assert [row[key].rank for key in likeliest] == sorted(row[key].rank for key in likeliest) or num < 0


@pytest.mark.parametrize("num", [0, 1, 4, -1])
def test_values_ranks_and_form(start, logprobs_of, num):
    (output,) = start().generate(prompt(20), GREEDY.clone(prompt_logprobs=num), use_tqdm=False)
    check(output, num, logprobs_of)
    entry = output.prompt_logprobs[1][output.prompt_token_ids[1]]
    assert entry.decoded_token is not None
    assert output.outputs[0].logprobs is None


@pytest.mark.parametrize("engine", ["whole", "chunked", "preempted", "late"])
@pytest.mark.parametrize("method", SPECULATION)
def test_in_chunks_and_after_preemptions_beside_others(start, logprobs_of, method, engine):
    llm = start(method, engine)
    prompts = [prompt(length, length) for length in (37, 5, 20, 50, 1, 2, 30, 16)]
    params = [
        GREEDY.clone(prompt_logprobs=None if i % 3 == 1 else i % 3 + 2, max_tokens=24) for i in range(8)
    ]
    plain = start().generate(prompts, params, use_tqdm=False)
    for wish, output, want in zip(params, llm.generate(prompts, params, use_tqdm=False), plain, strict=True):
        assert output.outputs[0].token_ids == want.outputs[0].token_ids
        if wish.prompt_logprobs is None:
            assert output.prompt_logprobs is None
        else:
            check(output, wish.prompt_logprobs, logprobs_of)
    if engine == "preempted":
        assert {m.name: m.value for m in llm.get_metrics()}["vllm:num_preemptions"] > 0


def test_a_preemption_in_the_middle_of_a_prompt(start, logprobs_of):
    """The long prompt is computed 8 tokens a step and loses its blocks before its end."""
    llm = start("ngram", max_num_batched_tokens=8, num_gpu_blocks_override=32, max_num_seqs=3)
    engine = llm.llm_engine
    for seed, name in enumerate("ab"):
        engine.add_request(name, prompt(24, seed), GREEDY.clone(max_tokens=60))
    for _ in range(12):
        engine.step()
    engine.add_request("long", prompt(100), GREEDY.clone(prompt_logprobs=2))
    lost, done = [], {}
    while engine.has_unfinished_requests():
        waiting = {request.id: request.scored for request in engine.core.scheduler.waiting}
        done |= {output.request_id: output for output in engine.step() if output.finished}
        lost += [scored for scored in waiting.values() if scored]
    assert lost and max(lost) < 99
    check(done["long"], 2, logprobs_of)


def test_the_cache_is_filled_and_not_read(start, logprobs_of):
    llm = start("scripted-self-draft")
    wish = GREEDY.clone(prompt_logprobs=1)
    for _ in range(2):
        (output,) = llm.generate(prompt(24), wish, use_tqdm=False)
        assert output.num_cached_tokens == 0
        check(output, 1, logprobs_of)
    (output,) = llm.generate(prompt(24), GREEDY, use_tqdm=False)
    assert output.num_cached_tokens >= 20


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_more_completions_share_one_list(start, logprobs_of, prefix_caching):
    llm = start("ngram", enable_prefix_caching=prefix_caching)
    wish = GREEDY.clone(n=3, temperature=1.0, seed=3, prompt_logprobs=2)
    (output,) = llm.generate(prompt(24), wish, use_tqdm=False)
    check(output, 2, logprobs_of)
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3
    if prefix_caching:  # the first computes the prompt, the others take it
        steps = {m.name: m.value for m in llm.get_metrics()}
        assert steps["vllm:prefix_cache_hits"] >= 40


def test_logits_are_made_in_slices(start, logprobs_of, monkeypatch):
    monkeypatch.setattr("specdecode.runner.runner.LOGIT_ROWS", 7)
    llm = start("ngram")
    model, sizes = llm.llm_engine.core.runner.model, []
    compute = model.compute_logits
    monkeypatch.setattr(model, "compute_logits", lambda hidden: sizes.append(len(hidden)) or compute(hidden))
    (output,) = llm.generate(prompt(60), GREEDY.clone(prompt_logprobs=2), use_tqdm=False)
    assert max(sizes) == 7 and sizes.count(7) == 8
    check(output, 2, logprobs_of)


def test_a_stream_of_deltas_tells_them_once(start):
    engine: LLMEngine = start("ngram").llm_engine
    told = {}
    for kind in RequestOutputKind:
        engine.add_request(kind.name, prompt(20), GREEDY.clone(prompt_logprobs=1, output_kind=kind))
        told[kind.name] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            told[output.request_id].append(output.prompt_logprobs)
    assert told["DELTA"][0] == told["FINAL_ONLY"][0] and set(map(type, told["DELTA"][1:])) == {type(None)}
    assert all(rows == told["DELTA"][0] for rows in told["CUMULATIVE"])


def test_more_than_the_vocabulary_is_refused(start):
    with pytest.raises(ConfigError, match="prompt_logprobs must be at most the vocabulary size 300, got 301"):
        start().generate(prompt(5), GREEDY.clone(prompt_logprobs=301), use_tqdm=False)
