"""The references that all else is measured by, against forwards written out by hand and the engine."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from specdecode import LLM, SamplingParams
from specdecode.contract import FINAL, Tap
from specdecode.models import load_model, resolve_model
from specdecode.testing import scripted
from specdecode.testing.reference import DenseStep, StatelessDrafter, dense_forward, reference_decode

PROMPT = np.random.default_rng(1).integers(3, 300, 12).tolist()
GREEDY = SamplingParams(temperature=0, max_tokens=10)
SEEDED = SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=10)


@pytest.fixture(scope="module")
def model(tiny_target):
    cpu = torch.device("cpu")
    return load_model(resolve_model(str(tiny_target)), dtype=torch.float32, device=cpu, max_model_len=64)


@pytest.fixture(scope="module")
def target(tiny_target):
    llm = LLM(
        str(tiny_target),
        dtype="float32",
        max_model_len=64,
        num_gpu_blocks_override=16,
        skip_tokenizer_init=True,
    )
    return llm.llm_engine.target


def test_greedy_is_the_largest_logit(model):
    ids = list(PROMPT)
    for _ in range(GREEDY.max_tokens):
        hidden, _ = dense_forward(model, ids)
        ids.append(int(model.compute_logits(hidden)[-1].argmax()))
    assert reference_decode(model, PROMPT, GREEDY) == ids[len(PROMPT) :]


def test_a_prefix_computes_what_the_whole_computes(model):
    taps = (Tap(0), Tap(1), Tap(2), FINAL)
    whole, tapped = dense_forward(model, PROMPT, taps)
    part, tapped_part = dense_forward(model, PROMPT[:7], taps)
    torch.testing.assert_close(part, whole[:7], atol=1e-5, rtol=1e-4)
    for short, long in zip(tapped_part, tapped, strict=True):
        torch.testing.assert_close(short, long[:7], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(tapped[0], model.embed_tokens(torch.tensor(PROMPT)))
    torch.testing.assert_close(model.norm(tapped[2]), tapped[3])
    assert tapped[3] is whole


def test_draws_depend_on_seed_and_completion(model):
    draws = {
        (seed, index): tuple(reference_decode(model, PROMPT, SEEDED, seed=seed, index=index))
        for seed in (5, 6)
        for index in (0, 1)
    }
    assert len(set(draws.values())) == 4
    assert draws[5, 0] == tuple(reference_decode(model, PROMPT, SEEDED, seed=5))


def test_where_it_ends(model):
    ids = reference_decode(model, PROMPT, GREEDY)
    stop = ids[3]
    cut = ids[: ids.index(stop) + 1]
    assert reference_decode(model, PROMPT, GREEDY, eos_ids=(stop,)) == cut
    assert reference_decode(model, PROMPT, GREEDY.clone(stop_token_ids=[stop])) == cut
    assert reference_decode(model, PROMPT, GREEDY.clone(ignore_eos=True), eos_ids=(stop,)) == ids
    late = reference_decode(model, PROMPT, GREEDY.clone(min_tokens=6), eos_ids=(stop,))
    assert stop not in late[:6] and len(late) >= 6
    assert len(reference_decode(model, PROMPT, GREEDY.clone(max_tokens=100), max_model_len=20)) == 8
    with pytest.raises(ValueError, match="stop strings"):
        reference_decode(model, PROMPT, GREEDY.clone(stop=["x"]))


def test_penalties_see_the_output(model):
    biased = GREEDY.clone(logit_bias={7: 20.0}, max_tokens=6)
    assert reference_decode(model, PROMPT, biased) == [7] * 6
    penalised = biased.clone(presence_penalty=2.0, repetition_penalty=10.0)
    assert set(reference_decode(model, PROMPT, penalised)) != {7}


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_copy_of_the_target_drafts_what_it_draws(model, target, params):
    scripted.install()
    drafter = StatelessDrafter(model, target, {"method": "scripted-self-draft", "num_speculative_tokens": 4})
    text = PROMPT + reference_decode(model, PROMPT, params, seed=5)
    for length in range(len(PROMPT) + 1, len(text) - 4):
        step = DenseStep(
            history=text[:length], prompt_len=len(PROMPT), params=params, budget=4, room=4, seed=5
        )
        assert drafter.drafts(step) == (tuple(text[length : length + 4]), (-1, 0, 1, 2))


@pytest.mark.parametrize(
    "config",
    [
        {"method": "scripted-eagle", "num_speculative_tokens": 3},
        {"method": "scripted-eagle", "num_speculative_tokens": 6, "fanout": 2, "depth": 3},
        {"method": "scripted-eagle", "num_speculative_tokens": 3, "three_taps": True},
        {"method": "scripted-medusa"},
    ],
)
def test_drafts_depend_on_the_whole_history_and_nothing_else(model, target, config):
    scripted.install()
    drafter = StatelessDrafter(model, target, config)
    rng = np.random.default_rng(0)

    def drafts(history):
        step = DenseStep(history=history, prompt_len=3, params=GREEDY, budget=6, room=3)
        return drafter.drafts(step)

    changed = 0
    for _ in range(40):
        history = rng.integers(3, 300, 12).tolist()
        first = drafts(history)
        drafts(rng.integers(3, 300, 20).tolist())
        assert drafts(history) == first
        changed += drafts([int(rng.integers(3, 300)), *history[1:-1], history[-1]]) != first
    assert changed > 0


def test_the_engine_decodes_as_the_reference(model, tiny_target):
    llm = LLM(
        str(tiny_target),
        device="cpu",
        block_size=4,
        num_gpu_blocks_override=64,
        max_model_len=64,
        skip_tokenizer_init=True,
    )
    outputs = llm.generate([{"prompt_token_ids": PROMPT}] * 2, [GREEDY, SEEDED], use_tqdm=False)
    greedy, seeded = (list(output.outputs[0].token_ids) for output in outputs)
    assert greedy == reference_decode(model, PROMPT, GREEDY, eos_ids=(2,))
    assert seeded == reference_decode(model, PROMPT, SEEDED, seed=5, eos_ids=(2,))
