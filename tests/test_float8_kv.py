"""``kv_cache_dtype="fp8"``: half the memory or less, and output that does not depend on drafts."""

from __future__ import annotations

import numpy as np
import pytest
from specdec_kernels.native import library
from specdecode import LLM, SamplingParams
from specdecode.contract import ConfigError
from specdecode.testing.tiny import tiny_checkpoint

needs_kernels = pytest.mark.skipif(library() is None, reason="the C++ kernels could not be compiled here")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("float8"), output_scale=0.3, hidden_size=128)


def run(model, dtype, **keywords):
    rng = np.random.default_rng(0)
    prompts = [
        {"prompt_token_ids": np.resize(rng.integers(3, 259, period), length).tolist()}
        for period, length in ((3, 20), (5, 61), (40, 40))
    ]
    params = [
        SamplingParams(temperature=0.8 if i % 2 else 0.0, seed=i, max_tokens=24, ignore_eos=True, logprobs=2)
        for i in range(len(prompts))
    ]
    with LLM(str(model), dtype=dtype, device="cpu", max_model_len=128, **keywords) as llm:
        outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
        accepted = {metric.name: metric.value for metric in llm.get_metrics()}
        return [(o.token_ids, o.logprobs) for o in outputs], accepted, llm.llm_engine.memory


@needs_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_output_does_not_depend_on_drafts(model, dtype):
    """Chunks, batches, prefix hits, preemption, a chain and a tree: to the last bit."""
    expected, _, small = run(model, dtype, kv_cache_dtype="fp8", max_num_seqs=1)
    ngram = {"method": "ngram", "num_speculative_tokens": 5}
    draft = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3}
    for keywords in (
        {"max_num_batched_tokens": 16, "max_num_seqs": 8, "speculative_config": ngram},
        {"block_size": 4, "num_gpu_blocks_override": 34, "speculative_config": ngram},
        {"speculative_config": draft, "async_scheduling": True},
    ):
        found, metrics, _ = run(model, dtype, kv_cache_dtype="fp8_e4m3", **keywords)
        assert found == expected, keywords
        assert metrics["vllm:spec_decode_num_accepted_tokens"] > 0
    plain, _, wide = run(model, dtype, max_num_seqs=1)
    assert wide.block_bytes == small.block_bytes * (4 if dtype == "float32" else 2)
    same = [a[0][:4] == b[0][:4] for a, b in zip(plain, expected, strict=True)]
    assert sum(same) >= 2  # it is the same model, rounded


@pytest.mark.parametrize(
    ("keywords", "needles"),
    [
        ({"kv_cache_dtype": "fp8_e5m2"}, ["kv_cache_dtype", "fp8_e5m2", "fp8_e4m3"]),
        ({"kv_cache_dtype": "fp8", "dtype": "float16"}, ["kv_cache_dtype='fp8'", "float32 and bfloat16"]),
    ],
)
def test_what_it_cannot_be(model, keywords, needles):
    with pytest.raises(ConfigError) as caught:
        LLM(str(model), device="cpu", **keywords)
    assert all(needle in str(caught.value) for needle in needles), str(caught.value)
