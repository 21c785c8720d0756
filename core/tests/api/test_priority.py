"""``scheduling_policy="priority"``: who is served first, and that nothing else changes."""

from __future__ import annotations

import pytest
from specdecode import LLM, SamplingParams
from specdecode.testing.tiny import tiny_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": [5 + i, 9, 7]} for i in range(4)]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = tiny_checkpoint(tmp_path_factory.mktemp("priority"))
    with LLM(path, device="cpu", max_model_len=64, max_num_seqs=1, scheduling_policy="priority") as llm:
        yield llm


def test_lower_ones_end_first_and_equal_ones_in_their_order(llm):
    engine, ended = llm.llm_engine, []
    for name, prompt, priority in zip("abcd", PROMPTS, (3, 0, 3, -1), strict=True):
        engine.add_request(name, prompt, GREEDY, priority=priority)
    while engine.has_unfinished_requests():
        ended += [output.request_id for output in engine.step() if output.finished]
    assert ended == ["d", "b", "a", "c"]


@pytest.mark.parametrize("priority", [2, [3, 0, 3, -1]])
def test_the_outputs_are_the_same_and_in_the_order_of_the_prompts(llm, priority):
    plain = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    ranked = llm.generate(PROMPTS, GREEDY, use_tqdm=False, priority=priority)
    assert [o.outputs[0].token_ids for o in ranked] == [o.outputs[0].token_ids for o in plain]
    assert [o.prompt_token_ids for o in ranked] == [o.prompt_token_ids for o in plain]
