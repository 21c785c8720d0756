"""On a GPU the bits of a token do not depend on what is computed beside it, in float32 and bfloat16 alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from specdecode import LLM, SamplingParams
from specdecode.contract import ConfigError
from specdecode.models import describe_target, resolve_model, why_not_exact
from specdecode.models.fused import SWITCH
from specdecode.testing.tiny import tiny_checkpoint

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")

NGRAM = {"method": "ngram", "num_speculative_tokens": 5}
RUNS = [
    {"max_num_seqs": 8},
    {"max_num_seqs": 8, "enforce_eager": True},
    {"max_num_seqs": 8, "max_num_batched_tokens": 24},
    {"max_num_seqs": 8, "exact": False},
    {"speculative_config": NGRAM, "max_num_seqs": 1},
    {"speculative_config": NGRAM, "max_num_seqs": 8},
    {"speculative_config": NGRAM, "max_num_seqs": 8, "enforce_eager": True, "async_scheduling": False},
    {"speculative_config": NGRAM, "max_num_seqs": 4, "block_size": 32, "num_gpu_blocks_override": 24},
]


@on_gpu
@pytest.mark.usefixtures("captured_steps")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3-moe", "mixtral"])
def test_output_is_identical(tmp_path, family, dtype):
    """Logprobs to the last bit, so that a difference too small to change a token is seen too."""
    path = tiny_checkpoint(tmp_path, family, output_scale=0.3, hidden_size=128, intermediate_size=384)
    rng = np.random.default_rng(0)
    prompts = [
        {"prompt_token_ids": np.resize(rng.integers(3, 259, period), length).tolist()}
        for period, length in ((3, 20), (5, 61), (7, 9), (4, 150), (40, 40), (6, 64))
    ]
    params = [
        SamplingParams(temperature=0.8 if i % 2 else 0.0, seed=i, max_tokens=40, ignore_eos=True, logprobs=2)
        for i in range(len(prompts))
    ]
    unlogged = [SamplingParams(temperature=p.temperature, seed=p.seed, max_tokens=40, ignore_eos=True)
                for p in params]  # fmt: skip

    def run(**keywords):
        engine = {"num_gpu_blocks_override": 400} | keywords
        with LLM(path, device="cuda", dtype=dtype, **engine) as llm:
            logged = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
            plain = [output.outputs[0] for output in llm.generate(prompts, unlogged, use_tqdm=False)]
            metrics = {metric.name: metric.value for metric in llm.get_metrics()}
        return [(o.token_ids, o.logprobs) for o in logged], [o.token_ids for o in plain], metrics

    expected, tokens, _ = run(exact=True, max_num_seqs=1)
    assert [ids for ids, _ in expected] == tokens
    for keywords in RUNS:
        found, found_tokens, metrics = run(**keywords)
        assert found_tokens == tokens, keywords
        assert found == expected, keywords
        if "speculative_config" in keywords:
            assert metrics["vllm:spec_decode_num_accepted_tokens"] > 0


@pytest.fixture
def target(tmp_path):
    files = resolve_model(tiny_checkpoint(tmp_path))
    return describe_target(files, dtype=torch.bfloat16, device=CPU, max_model_len=64)


@pytest.mark.parametrize(
    ("dtype", "device", "needle"),
    [
        (torch.float16, CPU, "float16"),
        (torch.float16, CUDA, "float16"),
        (torch.bfloat16, torch.device("mps"), "mps"),
    ],
    ids=str,
)
def test_why_rows_are_not_invariant(target, dtype, device, needle):
    assert needle in why_not_exact(dtype, device, target)


def test_without_its_kernels_a_gpu_is_not_exact(target, monkeypatch):
    monkeypatch.setenv(SWITCH, "0")
    assert "Triton" in why_not_exact(torch.bfloat16, CUDA, target)


@on_gpu
def test_a_gpu_is_exact_by_default(target, tmp_path):
    for dtype in (torch.float32, torch.bfloat16):
        assert why_not_exact(dtype, CUDA, target) is None
    with pytest.raises(ConfigError, match="exact=True works in float32 and bfloat16, got dtype 'float16'"):
        LLM(tiny_checkpoint(tmp_path / "model"), device="cuda", dtype="float16", exact=True)
