"""New weights under captured graphs: what replays them computes with the new ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

PROMPTS = ["one two one two one two", "a b c a b c a b", "what is it that"]


@pytest.fixture(autouse=True)
def captured_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs: checking each step's writes, as the other tests of this folder do, would forbid them."""
    monkeypatch.delenv("SPECDECODE_CHECK_WRITES", raising=False)


def outputs(llm: Any) -> list[tuple[int, ...]]:
    from specdecode import SamplingParams

    params = [
        SamplingParams(temperature=0.7 * (index % 2), seed=index, max_tokens=40, ignore_eos=True)
        for index in range(len(PROMPTS))
    ]
    return [tuple(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, params, use_tqdm=False)]


def accepted(llm: Any) -> float:
    return next(m.value for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", ["ngram", "eagle3", "mtp"])
def test_replayed_graphs_compute_with_the_new_weights(method, dtype, tmp_path):
    from specdec_eagle.testing import write_head
    from specdec_mtp.testing import write_target
    from specdecode import LLM
    from specdecode.testing.tiny import tiny_checkpoint

    write = write_target if method == "mtp" else tiny_checkpoint
    old, new = (write(tmp_path / str(seed), seed=seed, output_scale=0.3) for seed in (0, 1))
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    if method == "eagle3":
        head = write_head(tmp_path / "head", "eagle3", old, draft_vocab=150, lm_head=False)
        config |= {"model": str(head), "aux_layer_ids": [0, 1, 2]}
    fields: dict[str, Any] = {"dtype": dtype, "max_model_len": 96, "gpu_memory_utilization": 0.2}
    fields["num_gpu_blocks_override"] = 64  # other tests are on the card as well
    if method == "mtp":
        pytest.importorskip("tokenizers")
        tiny_checkpoint(tmp_path / "tokenizer")
        fields["tokenizer"] = str(tmp_path / "tokenizer")
    with LLM(str(old), speculative_config=config, **fields) as llm:
        assert llm.llm_engine.core.steady.captured
        before, count = outputs(llm), accepted(llm)
        llm.update_weights(new)
        after, count = outputs(llm), accepted(llm) - count
    with LLM(str(new), speculative_config=config, **fields) as fresh:
        assert after == outputs(fresh) != before
        assert count == accepted(fresh)
