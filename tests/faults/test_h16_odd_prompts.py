"""H16: prompts of one token, equal tokens, shorter than a window; models with no, one or more EOS ids."""

from __future__ import annotations

import pytest

PROMPTS = {
    "one-token": [77],
    "two-equal": [78, 78],
    "forty-copies": [79] * 40,
    "three": [80, 81, 82],
    "a-special-token": [2],
    "eos-within": [90, 2, 91, 2],
}
EOS = {"none": None, "one": 2, "list": [2, 150, 151]}


@pytest.fixture(scope="module", params=EOS)
def checkpoint(request, tmp_path_factory):
    from specdecode.testing.tiny import tiny_checkpoint

    eos = EOS[request.param]
    path = tmp_path_factory.mktemp(f"eos-{request.param}")
    return str(
        tiny_checkpoint(
            path,
            output_scale=0.5,
            max_position_embeddings=256,
            eos_token_id=eos,
            generation={"eos_token_id": eos},
        )
    )


@pytest.fixture
def asks(faults):
    return [faults.ask(prompt, max_tokens=7) for prompt in PROMPTS.values()] + [
        faults.ask(prompt, max_tokens=7, temperature=0.9, seed=3, logit_bias={2: 4.0, 150: 4.0})
        for prompt in list(PROMPTS.values())[:3]
    ]


def test_h16_odd_prompts(faults, same, drafter, checkpoint, asks):
    """In one batch, then the shortest alone."""
    want = faults.base(asks, model=checkpoint)
    texts = faults.texts(asks, model=checkpoint)
    engine = faults.engine(faults.drafter(drafter, texts, 3), model=checkpoint)
    same(engine.generate(asks), want)
    same(engine.generate(asks[:1]), want[:1], "alone")


def test_h16_the_sampled_ones_do_end_by_eos(faults, checkpoint, asks):
    """So that the comparison above sees an end where the model has one."""
    reasons = {output.outputs[0].finish_reason for output in faults.base(asks, model=checkpoint)[6:]}
    assert ("stop" in reasons) == ("eos-none" not in checkpoint)


@pytest.mark.parametrize("prompt", [{"prompt_token_ids": []}, ""])
def test_h16_an_empty_prompt(faults, same, drafter, prompt):
    """The same error as without speculation; the next request is served."""
    from specdecode import SamplingParams

    ask = faults.ask([80, 81, 82] * 3, max_tokens=6)
    engine, errors = faults.engine(faults.drafter(drafter, faults.texts([ask]), 3)), []
    for one in (faults.plain(), engine):
        with pytest.raises(ValueError) as caught:
            one.llm.generate(prompt, SamplingParams(temperature=0.0), use_tqdm=False)
        errors.append(str(caught.value))
    assert errors[0] == errors[1] and "empty" in errors[0]
    same(engine.generate([ask]), faults.base([ask]))
