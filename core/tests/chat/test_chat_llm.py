"""LLM.chat: the template in front of generate, with and without speculation; and advice after a run."""

from __future__ import annotations

import inspect
import logging

import pytest
import torch
from specdecode import LLM, SamplingParams
from specdecode.contract import ConfigError
from specdecode.engine.advice import Advisor, SpeculationFigures
from specdecode.testing.tiny import tiny_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
CONVERSATIONS = [
    [{"role": "user", "content": "hi"}],
    [
        {"role": "system", "content": "short"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": [{"type": "text", "text": "c"}]},
    ],
]


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    torch.set_num_threads(1)
    path = str(tiny_checkpoint(tmp_path_factory.mktemp("tiny"), zero_outputs=True))
    ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    with (
        LLM(path, dtype="float32") as plain,
        LLM(path, dtype="float32", speculative_config=ngram) as drafting,
    ):
        yield plain, drafting


def test_the_order_of_arguments_is_vllms():
    assert list(inspect.signature(LLM.chat).parameters) == [
        "self",
        "messages",
        "sampling_params",
        "use_tqdm",
        "lora_request",
        "chat_template",
        "chat_template_content_format",
        "add_generation_prompt",
        "continue_final_message",
        "tools",
        "chat_template_kwargs",
        "tokenization_kwargs",
        "mm_processor_kwargs",
    ]


def test_several_conversations_are_answered_in_order_with_and_without_speculation(engines):
    plain, drafting = (llm.chat(CONVERSATIONS, GREEDY, False) for llm in engines)
    assert plain[0].prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert "b<|im_end|>" in plain[1].prompt and "c<|im_end|>" in plain[1].prompt
    for a, b in zip(plain, drafting, strict=True):
        assert a.prompt == b.prompt and a.prompt_token_ids == b.prompt_token_ids
        assert a.outputs[0].token_ids == b.outputs[0].token_ids and a.outputs[0].text == b.outputs[0].text
    assert sum(output.metrics.accepted for output in drafting) > 0


def test_one_conversation_is_the_same_as_its_prompt(engines):
    llm = engines[1]
    (answer,) = llm.chat(CONVERSATIONS[0], GREEDY, use_tqdm=False)
    (same,) = llm.generate({"prompt_token_ids": answer.prompt_token_ids}, GREEDY, use_tqdm=False)
    assert answer.outputs[0].token_ids == same.outputs[0].token_ids


def test_each_conversation_may_have_its_own_parameters(engines):
    params = [GREEDY.clone(max_tokens=3), GREEDY.clone(max_tokens=5)]
    outputs = engines[1].chat(CONVERSATIONS, params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 5]


def test_options_reach_the_template(engines):
    llm = engines[0]
    begun = [*CONVERSATIONS[0], {"role": "assistant", "content": "We"}]
    (output,) = llm.chat(
        begun, GREEDY, use_tqdm=False, add_generation_prompt=False, continue_final_message=True
    )
    assert output.prompt.endswith("assistant\nWe")
    (output,) = llm.chat(
        CONVERSATIONS[0], GREEDY, use_tqdm=False, chat_template="{{ tools[0].name }}{{ mood }}",
        tools=[{"name": "now"}], chat_template_kwargs={"mood": "calm"},
    )  # fmt: skip
    assert output.prompt == "nowcalm"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lora_request": object()}, "lora_request wants an engine with room"),
        ({"mm_processor_kwargs": {"size": 4}}, "mm_processor_kwargs={'size': 4} is refused"),
        ({"tokenization_kwargs": {"truncation": True}}, "tokenization_kwargs=.*truncate_prompt_tokens"),
        ({"messages": [CONVERSATIONS[0], [{"role": "user", "content": [{"type": "image_url"}]}]]},
         r"messages\[1\]\[0\]\.content\[0\] is of type 'image_url'"),
        ({"messages": [CONVERSATIONS[0], [{"role": "user", "content": "x" * 600}]]},
         r"prompts\[1\] has 6\d\d tokens"),
        ({"sampling_params": [GREEDY]}, "one for each of the 2 prompts"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_and_nothing_runs(engines, arguments, message):
    llm = engines[0]
    with pytest.raises(ConfigError, match=message):
        llm.chat(**({"messages": CONVERSATIONS, "sampling_params": GREEDY, "use_tqdm": False} | arguments))
    assert not llm.llm_engine.has_unfinished_requests()


def test_a_run_is_followed_by_advice_on_what_it_counted(engines, caplog, monkeypatch):
    plain, drafting = engines
    now = [0.0]
    monkeypatch.setattr(drafting, "_advisor", Advisor(clock=lambda: now[0]))
    with caplog.at_level(logging.INFO, "specdecode.engine.advice"):
        plain.chat(CONVERSATIONS[0], GREEDY.clone(max_tokens=200), use_tqdm=False)
        drafting.chat(CONVERSATIONS[0], GREEDY.clone(max_tokens=20), use_tqdm=False)  # too few drafts
        assert not caplog.records
        for _ in range(2):
            drafting.chat(CONVERSATIONS[0], GREEDY.clone(max_tokens=200), use_tqdm=False)
        assert [record.levelname for record in caplog.records] == ["INFO"]
        assert "lengthen num_speculative_tokens" in caplog.text
        now[0] = 61.0
        drafting.chat(CONVERSATIONS[0], GREEDY.clone(max_tokens=200), use_tqdm=False)
    assert len(caplog.records) == 2


@pytest.mark.parametrize("adaptive", [False, True])
def test_the_advice_knows_who_chooses_the_length(tmp_path, adaptive):
    poor = SpeculationFigures(
        drafts=100, draft_tokens=400, accepted=40, decode_steps=100, decode_tokens=140, target_seconds=1.0
    )
    config = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": adaptive}
    with LLM(str(tiny_checkpoint(tmp_path)), dtype="float32", speculative_config=config) as llm:
        line = llm._advisor.tell(poor).line
    assert "try another method" in line and ("shorten num_speculative_tokens" in line) is not adaptive
