"""Weights that stay quantised, in the engine: output with and without speculation, targets and drafts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from specdec_kernels.native import library
from specdecode import LLM, SamplingParams
from specdecode.testing.quantized import LAYOUTS, quantized_checkpoint

pytestmark = pytest.mark.skipif(library() is None, reason="the C++ kernels could not be compiled here")

PROMPTS = [
    {"prompt_token_ids": np.resize(np.random.default_rng(seed).integers(3, 259, period), length).tolist()}
    for seed, (period, length) in enumerate(((3, 20), (5, 61), (7, 9), (40, 40)))
]
PARAMS = [
    SamplingParams(temperature=0.8 if i % 2 else 0.0, seed=i, max_tokens=20, ignore_eos=True, logprobs=2)
    for i in range(len(PROMPTS))
]
SMALL = {"output_scale": 0.3, "hidden_size": 128, "intermediate_size": 192}


def run(path, **keywords):
    """Tokens and log-probabilities to the last bit, and how many drafts were accepted."""
    options = {
        "device": "cpu",
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_model_len": 128,
    } | keywords
    with LLM(str(path), **options) as llm:
        outputs = [output.outputs[0] for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
        metrics = {metric.name: metric.value for metric in llm.get_metrics()}
    return [(list(o.token_ids), o.logprobs) for o in outputs], metrics.get(
        "vllm:spec_decode_num_accepted_tokens", 0
    )


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [*((layout, "bfloat16") for layout in LAYOUTS), *((layout, "float32") for layout in ("awq", "fp8"))],
)
def test_output_does_not_depend_on_drafts(layout, dtype, tmp_path):
    """Greedy and seeded: without speculation, by prompt lookup, and by a draft model in the same layout."""
    target, _ = quantized_checkpoint(tmp_path / "target", layout, **SMALL)
    expected, _ = run(target, dtype=dtype)
    draft = {"method": "draft_model", "model": str(target), "num_speculative_tokens": 3}
    for config in ({"method": "ngram", "num_speculative_tokens": 4}, draft):
        found, accepted = run(
            target, dtype=dtype, speculative_config=config, max_num_batched_tokens=16, max_num_seqs=4
        )
        assert found == expected, config
        assert accepted > 0, config


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["awq", "gptq-desc-act", "fp8", "fp8-block", "compressed-int8-channel"])
def test_output_does_not_depend_on_drafts_on_a_gpu(layout, dtype, tmp_path):
    """The same with captured steps, and with keys and values in float8."""
    sizes = SMALL | {"hidden_size": 512, "intermediate_size": 640}
    target, _ = quantized_checkpoint(tmp_path / "target", layout, **sizes)
    for cache in ("auto", "fp8"):
        options = {"device": "cuda", "dtype": dtype, "kv_cache_dtype": cache}
        expected, _ = run(target, enforce_eager=True, max_num_seqs=1, **options)
        draft = {"method": "draft_model", "model": str(target), "num_speculative_tokens": 3}
        for config in ({"method": "ngram", "num_speculative_tokens": 4}, draft):
            found, accepted = run(target, speculative_config=config, max_num_seqs=4, **options)
            assert found == expected and accepted > 0, (config, cache)


def test_a_draft_may_be_quantised_in_another_way(tmp_path):
    target, dense = quantized_checkpoint(tmp_path / "target", "awq", **SMALL)
    draft, _ = quantized_checkpoint(tmp_path / "draft", "fp8", **SMALL)
    config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    for model in (target, dense):
        expected, _ = run(model)
        found, accepted = run(model, speculative_config=config)
        assert found == expected and accepted > 20
