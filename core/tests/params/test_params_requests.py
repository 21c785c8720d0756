"""At the door: truncation, assignments and snapshots; and a model that gives NaN."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from specdecode import SamplingParams, TokensPrompt
from specdecode.contract import ConfigError
from specdecode.engine.spacing import TightSpecialTokens
from specdecode.testing.tiny import tiny_checkpoint

PROMPT = TokensPrompt(prompt_token_ids=[101, 102, 103, 104] * 3)
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


def one(llm, params, prompt=PROMPT):
    return llm.generate(prompt, params, use_tqdm=False)[0]


# -- truncate_prompt_tokens -----------------------------------------------------------------------
@pytest.mark.parametrize("prompt", [PROMPT, {"prompt": "bcdebcdefghi"}])
def test_the_last_tokens_are_kept(start, prompt):
    llm = start("ngram")
    whole = one(llm, GREEDY, prompt)
    for keep in (1, 5, 12, 500):
        output = one(llm, GREEDY.clone(truncate_prompt_tokens=keep), prompt)
        assert output.prompt_token_ids == whole.prompt_token_ids[-keep:]
        short = one(llm, GREEDY, TokensPrompt(prompt_token_ids=whole.prompt_token_ids[-keep:]))
        assert output.outputs[0].token_ids == short.outputs[0].token_ids
        assert output.prompt == prompt.get("prompt")


def test_it_comes_before_the_length_is_checked(start):
    llm = start("ngram")
    long = TokensPrompt(prompt_token_ids=[7 + i % 90 for i in range(300)])
    with pytest.raises(ConfigError, match="300 tokens"):
        one(llm, GREEDY, long)
    assert len(one(llm, GREEDY.clone(truncate_prompt_tokens=100), long).prompt_token_ids) == 100
    fitted = one(llm, GREEDY.clone(truncate_prompt_tokens=-1), long)
    assert fitted.prompt_token_ids == long["prompt_token_ids"][-127:]
    assert len(fitted.outputs[0].token_ids) == 1
    with pytest.raises(ConfigError, match="200 tokens"):
        one(llm, GREEDY.clone(truncate_prompt_tokens=200), long)


# -- assignments ----------------------------------------------------------------------------------
def test_a_queued_request_keeps_what_it_was_given(start):
    llm = start("ngram")
    want = one(llm, GREEDY).outputs[0].token_ids
    engine, params = llm.llm_engine, GREEDY.clone(logit_bias={5: 0.0})
    engine.add_request("a", PROMPT, params)
    params.max_tokens = 2
    params.logit_bias[77] = 100.0
    params.temperature = 3.0
    engine.step()
    params.stop_token_ids = list(range(300))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[-1].outputs[0].token_ids == want


def test_what_was_smuggled_in_is_checked_at_the_door(start):
    params = GREEDY.clone(logit_bias={5: 0.0})
    params.logit_bias[5] = float("nan")
    with pytest.raises(ConfigError, match=r"logit_bias\[5\]"):
        one(start(), params)


def test_a_snapshot_refuses_assignments_and_a_clone_of_it_does_not():
    snapshot = GREEDY.snapshot()
    assert snapshot == GREEDY
    for copied in (snapshot, copy.deepcopy(snapshot), pickle.loads(pickle.dumps(snapshot))):
        with pytest.raises(AttributeError, match="max_tokens"):
            copied.max_tokens = 3
        assert copied.max_tokens == 16
    clone = snapshot.clone()
    clone.max_tokens = 3
    assert clone.max_tokens == 3 and snapshot.max_tokens == 16


def test_proposers_are_shown_the_snapshot(start):
    seen = []
    llm = start("ngram")
    proposer = llm.llm_engine.core.drafting.proposer.proposer
    add = proposer.on_add
    proposer.on_add = lambda request: seen.append(request.params) or add(request)
    one(llm, GREEDY)
    with pytest.raises(AttributeError):
        seen[0].temperature = 1.0


# -- spaces_between_special_tokens ----------------------------------------------------------------
def test_special_tokens_side_by_side_are_decoded_apart():
    spaced = SimpleNamespace(
        all_special_ids=[0, 1],
        decode=lambda ids, **options: " ".join(map(str, ids)),
    )
    tight = TightSpecialTokens(spaced)
    for ids, text in [
        ([], ""),
        ([5], "5"),
        ([5, 0, 6, 7], "5 0 6 7"),
        ([0, 1, 0, 5, 1], "010 5 1"),
        ([5, 6, 1, 1], "5 6 11"),
    ]:
        assert tight.decode(ids) == text


# -- a model that gives NaN -----------------------------------------------------------------------
@pytest.fixture(scope="module")
def poisoned(tmp_path_factory):
    """A checkpoint in which token 77 turns everything after it into NaN."""
    path = tiny_checkpoint(tmp_path_factory.mktemp("poisoned"), output_scale=0.3)
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"][77] = torch.nan
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return str(path)


@pytest.mark.parametrize("engine", ["whole", "chunked", "preempted", "late"])
@pytest.mark.parametrize("method", [None, "ngram", "scripted-self-draft", "scripted-eagle"])
def test_nan_logits_end_their_own_request(start, poisoned, method, engine):
    llm = start(method, engine, model=poisoned)
    seeded = GREEDY.clone(temperature=0.9, seed=4, top_p=0.9, logprobs=2, max_tokens=24)
    prompts = [TokensPrompt(prompt_token_ids=[token, *PROMPT["prompt_token_ids"]]) for token in range(60, 68)]
    params = [GREEDY, seeded] * 4
    want = [o.outputs[0].token_ids for o in start().generate(prompts, params, use_tqdm=False)]
    for place in (1, 6):
        prompts[place] = TokensPrompt(prompt_token_ids=[5, 77, *range(110, 130)])
    params[3] = seeded.clone(logit_bias={77: 100.0}, min_tokens=3)  # draws 77, and then nothing
    for _ in range(2):  # the second time in blocks that held NaN
        outputs = [o.outputs[0] for o in llm.generate(prompts, params, use_tqdm=False)]
        for place, (output, ids) in enumerate(zip(outputs, want, strict=True)):
            if place not in (1, 3, 6):
                assert output.token_ids == ids and output.error is None
                continue
            assert output.finish_reason == "error" and "the model gave NaN logits" in output.error
            assert list(output.token_ids) == ([77] if place == 3 else [])


@pytest.mark.parametrize("engine", ["whole", "late"])
@pytest.mark.parametrize("method", ["scripted-oracle", "scripted-oracle-tree"])
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_a_draft_that_gives_nan_costs_no_request(start, poisoned, method, engine, kernels, monkeypatch):
    """Torch's attention multiplies the NaN of masked slots by zero, which is NaN: such a step is dropped."""
    if kernels == "torch":
        monkeypatch.setattr("specdec_kernels.native.loading.library", lambda: None)
    params = [GREEDY, GREEDY.clone(temperature=0.9, seed=4, prompt_logprobs=1)]
    prompts = [PROMPT, TokensPrompt(prompt_token_ids=[9, 8, 7, 6, 5])]
    want = start(model=poisoned).generate(prompts, params, use_tqdm=False)
    texts = [[*o.prompt_token_ids, *o.outputs[0].token_ids[:6], 77, 77, 77, 77] for o in want]
    llm = start(method, engine, model=poisoned, speculative={"texts": texts})
    for output, plain in zip(llm.generate(prompts, params, use_tqdm=False), want, strict=True):
        assert output.outputs[0].token_ids == plain.outputs[0].token_ids
        assert output.outputs[0].finish_reason == "length"
        assert output.metrics.accepted > 0
    metrics = llm.get_metrics()
    thrown_away = sum(m.value for m in metrics if m.name == "vllm:num_preemptions")
    thrown_away += sum(m.value for m in metrics if m.labels.get("reason") == "undrawable")
    assert thrown_away or kernels == "native"


def test_blocks_of_a_failed_request_are_not_offered(start, poisoned):
    llm = start(model=poisoned)
    for _ in range(2):
        output = one(llm, GREEDY, TokensPrompt(prompt_token_ids=[5, 77, *range(110, 130)]))
        assert output.outputs[0].finish_reason == "error" and output.num_cached_tokens == 0
