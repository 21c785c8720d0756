"""H29: ids outside the vocabulary are refused at the door, by field, and hurt nobody.

``LLM.generate`` refuses a call as a whole, before anything is queued; with ``LLMEngine.add_request``
the good requests beside the bad one are served. (The server, which will answer 400, comes later.)
"""

from __future__ import annotations

import pytest

VOCAB = 300
OUTSIDE = (-1, VOCAB, 2**40)
PROMPT = [60, 61, 62, 63] * 3


def bad_fields(token):
    """Parameters with ``token`` in every field that takes ids."""
    return {
        "logit_bias": {"logit_bias": {token: 1.0}},
        "stop_token_ids": {"stop_token_ids": [5, token]},
        "allowed_token_ids": {"allowed_token_ids": [token, 7]},
    }


@pytest.fixture
def engine(faults, drafter):
    return faults.engine(faults.drafter(drafter, faults.texts([good(faults)]), 4))


def good(faults):
    return faults.ask(PROMPT, max_tokens=10, ignore_eos=True)


def test_h29_every_field_that_takes_ids_is_here():
    """A new one has to come under the tests below."""
    import attrs
    from specdecode import SamplingParams

    takes_ids = {
        field.name
        for field in attrs.fields(SamplingParams)
        if "token_ids" in field.name or field.name in ("logit_bias", "bad_token_ids")
    }
    assert takes_ids == set(bad_fields(0))


def test_h29_refused_by_generate(faults, same, engine):
    """Nothing of the call was done; the next one is BASE's."""
    from specdecode import SamplingParams

    ask, llm = good(faults), engine.llm
    prompts = [{"prompt_token_ids": ask.prompt}] * 3
    for token in OUTSIDE:
        bad = [prompts[0], {"prompt_token_ids": [*PROMPT, token]}, prompts[2]]
        with pytest.raises(ValueError, match=rf"prompts\[1\]\.prompt_token_ids.*{VOCAB - 1}.*got {token}"):
            llm.generate(bad, ask.params, use_tqdm=False)
        for field, fields in bad_fields(token).items():
            with pytest.raises(ValueError) as caught:
                params = [ask.params, SamplingParams(temperature=0.0, **fields), ask.params]
                llm.generate(prompts, params, use_tqdm=False)
            assert field in str(caught.value) and str(token) in str(caught.value)
        assert not llm.llm_engine.has_unfinished_requests()
    assert engine.metric("vllm:generation_tokens") == 0 == engine.metric("vllm:prompt_tokens")
    same(engine.generate([ask]), faults.base([ask]))


def test_h29_refused_by_add_request(faults, same, engine):
    """Between two good requests, the first of them half done."""
    from specdecode import SamplingParams

    ask, llm, finished = good(faults), engine.llm.llm_engine, {}
    llm.add_request("before", {"prompt_token_ids": ask.prompt}, ask.params)
    for _ in range(2):
        finished |= {out.request_id: out for out in llm.step() if out.finished}
    for token in OUTSIDE:
        with pytest.raises(ValueError, match="prompt_token_ids"):
            llm.add_request("bad", {"prompt_token_ids": [token]}, ask.params)
        for field, fields in bad_fields(token).items():
            with pytest.raises(ValueError, match=field):
                params = SamplingParams(temperature=0.0, **fields)
                llm.add_request("bad", {"prompt_token_ids": ask.prompt}, params)
    llm.add_request("bad", {"prompt_token_ids": ask.prompt}, ask.params)  # the name was not taken
    for _ in range(60):
        finished |= {out.request_id: out for out in llm.step() if out.finished}
    same([finished["before"], finished["bad"]], faults.base([ask, ask]))


@pytest.mark.parametrize("ends", [0, VOCAB - 1])
def test_h29_the_first_and_the_last_id_are_in_it(faults, same, engine, ends):
    fields = {"stop_token_ids": [ends], "logit_bias": {ends: 1.0}, "allowed_token_ids": [ends, 60]}
    asks = [faults.ask([ends, 60, ends], max_tokens=6, ignore_eos=True, **fields)]
    same(engine.generate(asks), faults.base(asks))
