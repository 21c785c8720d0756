"""Adapters in every native family, beside experts, and on quantised weights: the logits of the merged."""

from __future__ import annotations

import pytest
import torch
from specdecode import LLM, LoRARequest, SamplingParams
from specdecode.contract import ConfigError
from specdecode.runner.dense import dense_forward
from specdecode.testing.adapters import ALL_LINEAR, merge_adapter, write_adapter
from specdecode.testing.quantized import quantized_checkpoint
from specdecode.testing.tiny import tiny_checkpoint

IDS = list(range(7, 50))
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
OPTIONS = {
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 64,
    "num_gpu_blocks_override": 40,
    "skip_tokenizer_init": True,
}


def logits(path, adapter=None, **options):
    """Of the tokens of ``IDS``, by an engine on ``path``."""
    room = {"enable_lora": True} if adapter else {}
    with LLM(str(path), **(OPTIONS | room | options)) as llm:
        slot = -1
        if adapter:
            request = LoRARequest("own", 1, str(adapter))
            prompt = {"prompt_token_ids": [5]}
            llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False, lora_request=request)
            slot = llm.llm_engine.adapter_of(request).slot
        model = llm.llm_engine.core.runner.model
        return model.compute_logits(dense_forward(model, IDS, adapter=slot)[0])


@pytest.mark.parametrize("fused", ["0", "1"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "smollm", "smollm3", "mixtral", "qwen3-moe"])
def test_families(tmp_path, monkeypatch, family, fused):
    monkeypatch.setenv("SPECDECODE_FUSED", fused)
    base = tiny_checkpoint(tmp_path / "base", family)
    modules = ATTENTION if family in ("mixtral", "qwen3-moe") else ALL_LINEAR
    adapter = write_adapter(tmp_path / "adapter", base, modules=modules)
    merged = merge_adapter(tmp_path / "merged", base, adapter)
    got = logits(base, adapter)
    torch.testing.assert_close(got, logits(merged), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(got, logits(base), atol=1e-2)


@pytest.mark.parametrize("fused", ["0", "1"])
@pytest.mark.parametrize("layout", ["gptq", "fp8-block"])
def test_quantised_weights(tmp_path, monkeypatch, layout, fused):
    monkeypatch.setenv("SPECDECODE_FUSED", fused)
    quantised, dense = quantized_checkpoint(tmp_path / "base", layout)
    adapter = write_adapter(tmp_path / "adapter", dense)
    merged = merge_adapter(tmp_path / "merged", dense, adapter)
    torch.testing.assert_close(logits(quantised, adapter), logits(merged), atol=1e-3, rtol=1e-3)


def test_int8(tmp_path):
    """Rounded by the base model's own rule; the adapter is not."""
    base = tiny_checkpoint(tmp_path / "base")
    adapter = write_adapter(tmp_path / "adapter", base)
    options = {"dtype": "bfloat16", "quantization": "int8"}
    expected = logits(merge_adapter(tmp_path / "merged", base, adapter))
    off = (logits(base, adapter, **options) - expected).abs().mean()
    assert off < 0.2 * (logits(base, **options) - expected).abs().mean()


def test_experts_are_refused(tmp_path):
    base = tiny_checkpoint(tmp_path / "base", "qwen3-moe")
    adapter = write_adapter(tmp_path / "adapter", base, modules=("gate_proj", "up_proj", "down_proj"))
    with pytest.raises(ConfigError, match=r"mlp\.experts\.\d\.\w+ cannot be adapted"):
        logits(base, adapter)
