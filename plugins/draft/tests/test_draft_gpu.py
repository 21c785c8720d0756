"""A draft model on a GPU, drafting inside the captured step: the same tokens as without it."""

from __future__ import annotations

import pytest
import torch
from specdecode import LLM, SamplingParams
from specdecode.testing.tiny import tiny_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def captured_steps(monkeypatch):
    """Graphs: checking each step's writes, as other tests of a run may ask for, would forbid them."""
    monkeypatch.delenv("SPECDECODE_CHECK_WRITES", raising=False)


def run(target, config, dtype, **options):
    """Ids of each request, and the engine's metrics."""
    prompts = [[3 + (7 * i + j) % 290 for j in range(4 + 9 * i)] for i in range(5)]
    kinds = (
        {"temperature": 0},
        {"temperature": 0.9, "seed": 5, "top_p": 0.9},
        {"temperature": 1.0, "seed": 6},
    )
    params = [SamplingParams(max_tokens=24, ignore_eos=True, **kinds[i % 3]) for i in range(5)]
    with LLM(
        str(target),
        dtype=dtype,
        max_model_len=96,
        num_gpu_blocks_override=200,
        max_num_seqs=8,
        skip_tokenizer_init=True,
        speculative_config=config,
        **options,
    ) as llm:
        outputs = llm.generate([{"prompt_token_ids": own} for own in prompts], params, use_tqdm=False)
        captured = llm.llm_engine.core.steady.captured
        values = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return [list(out.outputs[0].token_ids) for out in outputs], values, captured


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A target, and a draft of the same vocabulary."""
    folder = tmp_path_factory.mktemp("models")
    target = tiny_checkpoint(folder / "target", output_scale=0.2)
    return target, tiny_checkpoint(folder / "draft", "qwen3", seed=1)


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("how", ["itself", "other", "other-greedy"])
def test_the_same_tokens_as_without(models, how, dtype, eager):
    target, draft = models
    config = {
        "method": "draft_model",
        "model": str(target if how == "itself" else draft),
        "num_speculative_tokens": 4,
        "draft_sample_method": "greedy" if how == "other-greedy" else "probabilistic",
    }
    ids, values, captured = run(target, config, dtype, enforce_eager=eager)
    assert captured == (not eager)
    assert ids == run(target, None, dtype)[0]
    assert not values.get("specdecode:proposer_failures")
    if how == "itself":
        drafted = values["vllm:spec_decode_num_draft_tokens"]
        assert values["vllm:spec_decode_num_accepted_tokens"] == drafted > 0
