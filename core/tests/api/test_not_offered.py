"""vLLM's spellings that work here, and what is refused with a remedy."""

from __future__ import annotations

import functools
import gc
import weakref
from pathlib import Path

import pytest
import specdecode
import torch
from specdecode import LLM, AsyncLLM, EngineArgs, SamplingParams
from specdecode.api.not_offered import ARGUMENTS, FIELDS, MEMBERS
from specdecode.contract import ConfigError
from specdecode.distributed import cleanup_dist_env_and_memory
from specdecode.testing.tiny import tiny_checkpoint
from tqdm import tqdm

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.set_num_threads(1)
    return str(tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(checkpoint, max_model_len=64) as llm:
        yield llm


@pytest.mark.parametrize("name", MEMBERS)
def test_a_member_that_is_not_offered_says_what_to_do_instead(llm, name):
    assert not hasattr(llm, name)
    with pytest.raises(AttributeError, match=rf"LLM\.{name} is not offered: ") as caught:
        getattr(llm, name)
    assert MEMBERS[name] in str(caught.value)


def test_a_misspelt_member_is_none(llm):
    with pytest.raises(AttributeError, match=r"LLM\.generat is no attribute"):
        llm.generat  # noqa: B018


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_that_is_not_offered_is_refused_unless_it_asks_for_nothing(name):
    off, remedy = FIELDS[name]
    for value in (None, *off):
        assert SamplingParams(**{name: value}) == SamplingParams()
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**{name: [7]})
    assert caught.value.faults == (f"{name}=[7] is refused: {remedy}",)


def test_all_that_is_wrong_with_parameters_is_told_at_once():
    with pytest.raises(ConfigError) as caught:
        SamplingParams(max_new_tokens=5, flat_logprobs=True, top_p=2, zzz=1)
    first, second, third, fourth = caught.value.faults
    assert first == "max_new_tokens is no sampling parameter; did you mean 'max_tokens'?"
    assert second.startswith("flat_logprobs=True is refused: ")
    assert third == "zzz is no sampling parameter; docs/sampling.md lists them"
    assert fourth.startswith("top_p must be")
    with pytest.raises(ConfigError, match="temprature is no sampling parameter"):
        GREEDY.clone(temprature=1.0)


def test_from_optional_takes_none_for_defaults_and_json_for_biases():
    params = SamplingParams.from_optional(
        n=None, temperature=None, top_p=None, stop=None, max_tokens=None, logit_bias={"3": 500, 4: -1}
    )
    assert params == SamplingParams(max_tokens=None, logit_bias={3: 100.0, 4: -1})
    assert SamplingParams.from_optional() == SamplingParams()
    with pytest.raises(ConfigError, match="logit_bias must have token ids as keys, got 'x'"):
        SamplingParams.from_optional(logit_bias={"x": 1})
    with pytest.raises(ConfigError, match=r"logit_bias\[3\] must be a number"):
        SamplingParams.from_optional(logit_bias={"3": "much"})


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_that_is_not_offered_is_refused(llm, name):
    assert llm.generate("a", GREEDY, use_tqdm=False, **{name: None})
    with pytest.raises(ConfigError) as caught:
        llm.generate("a", GREEDY, use_tqdm=False, **{name: {"size": 4}})
    assert str(caught.value) == f"{name}={{'size': 4}} is refused: {ARGUMENTS[name]}"


def test_engine_args_make_an_llm(checkpoint):
    args = EngineArgs(model=checkpoint, max_model_len=48)
    for llm in (LLM.from_engine_args(args), LLM(**vars(args))):
        assert llm.llm_engine.args == args
        assert llm.get_tokenizer() is llm.llm_engine.get_tokenizer()
        llm.shutdown()


def test_bare_token_ids_are_a_prompt(llm):
    def ids(prompts):
        return [output.prompt_token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]

    assert ids([5, 6]) == ids((5, 6)) == [[5, 6]]
    assert ids([[5, 6], "a", (7,)])[::2] == [[5, 6], [7]]
    for wrong, message in [
        ([5, "a"], r"prompts\[0\]\.prompt_token_ids must hold integers, got 'a'"),
        ([[5], []], r"prompts\[1\] must be a string, a TextPrompt, a TokensPrompt or a list of token ids"),
        ([[5], [True]], r"prompts\[1\]\.prompt_token_ids must hold integers, got True"),
    ]:
        with pytest.raises(ConfigError, match=message):
            llm.generate(wrong, GREEDY, use_tqdm=False)


def test_token_ids_of_prompt_and_output_are_lists(llm):
    (output,) = llm.generate([5, 6], GREEDY, use_tqdm=False)
    assert output.prompt_token_ids + output.outputs[0].token_ids == [5, 6, *output.outputs[0].token_ids]
    output.prompt_token_ids.append(1)
    assert llm.generate([5, 6], GREEDY, use_tqdm=False)[0].prompt_token_ids == [5, 6]


def test_a_request_tells_its_first_tokens_latency(llm):
    metrics = llm.generate([5, 6], GREEDY, use_tqdm=False)[0].metrics
    assert metrics.first_token_latency == metrics.first_token_time - metrics.arrival_time > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_dtype_may_be_torchs(checkpoint, dtype):
    args = EngineArgs(model=checkpoint, dtype=dtype)
    assert f"torch.{args.dtype}" == str(dtype)
    with pytest.raises(ConfigError, match=r"EngineArgs\.dtype must be one of .* got 'int8'"):
        EngineArgs(model=checkpoint, dtype=torch.int8)


def test_a_callable_makes_the_progress_bar(llm):
    bars = []

    class Bar(tqdm):
        def __init__(self, *args, **keywords):
            super().__init__(*args, **keywords)
            bars.append((self, self.disable))  # a closed one is disabled

    llm.generate(["a", "b"], GREEDY, use_tqdm=Bar)
    llm.generate(["a"], GREEDY, use_tqdm=functools.partial(Bar, disable=True))
    assert [(bar.total, disabled) for bar, disabled in bars] == [(2, False), (1, True)]
    assert bars[0][0].n == 2


def test_a_dropped_engine_is_freed(checkpoint):
    llm = LLM(checkpoint, max_model_len=48)
    llm.generate("a", GREEDY, use_tqdm=False)
    engine = weakref.ref(llm.llm_engine)
    gc.disable()
    try:
        del llm
        cleanup_dist_env_and_memory()
    finally:
        gc.enable()
    assert engine() is None


def test_names_that_scripts_import():
    assert specdecode.AsyncLLMEngine is AsyncLLM
    assert all(getattr(specdecode, name) is not None for name in specdecode.__all__)


def test_the_manual_lists_what_is_not_offered():
    page = (Path(__file__).resolve().parents[3] / "docs/moving.md").read_text(encoding="utf-8")
    assert [name for name in (*MEMBERS, *FIELDS, *ARGUMENTS) if f"`{name}`" not in page] == []
