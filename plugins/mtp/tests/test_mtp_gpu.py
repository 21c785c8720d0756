"""Layers on a GPU, drafting inside the captured step: the same tokens as without them."""

from __future__ import annotations

import pytest
import torch
from specdec_mtp.testing import write_target
from specdecode import LLM, SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def captured_steps(monkeypatch):
    """Graphs: checking each step's writes, as other tests of a run may ask for, would forbid them."""
    monkeypatch.delenv("SPECDECODE_CHECK_WRITES", raising=False)


TARGETS = {"mimo": ("mimo", 1), "mimo3": ("mimo", 3)}


@pytest.fixture(scope="module", params=TARGETS)
def own(request, tmp_path_factory):
    layout, modules = TARGETS[request.param]
    return write_target(tmp_path_factory.mktemp("gpu") / request.param, layout, modules=modules)


def run(target, config, **options):
    """Ids of each request, and the metrics."""
    prompts = [[3 + (7 * i + j) % 290 for j in range(4 + 9 * i)] for i in range(5)]
    kinds = (
        {"temperature": 0},
        {"temperature": 0.9, "seed": 5, "top_p": 0.9},
        {"temperature": 1.0, "seed": 6},
    )
    params = [SamplingParams(max_tokens=24, ignore_eos=True, **kinds[i % 3]) for i in range(5)]
    with LLM(
        str(target),
        dtype="float32",
        max_model_len=96,
        num_gpu_blocks_override=200,
        max_num_seqs=8,
        skip_tokenizer_init=True,
        speculative_config=config,
        **options,
    ) as llm:
        outputs = llm.generate([{"prompt_token_ids": own} for own in prompts], params, use_tqdm=False)
        values = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return [list(out.outputs[0].token_ids) for out in outputs], values


def test_the_same_tokens_as_without_in_graphs_and_eagerly(own):
    config = {"method": "mtp", "num_speculative_tokens": 4}
    plain = run(own, None)[0]
    accepted = []
    for eager in (False, True):
        ids, values = run(own, config, enforce_eager=eager)
        assert ids == plain
        assert not values.get("specdecode:proposer_failures")
        accepted.append(values["vllm:spec_decode_num_accepted_tokens"])
    assert accepted[0] == accepted[1] > 0


def test_layers_of_transformers_kind(tmp_path):
    """Its rows are not invariant, so that nothing is said of the last bits."""
    target = write_target(tmp_path / "glm", "glm4_moe", modules=2)
    values = run(target, {"method": "mtp", "num_speculative_tokens": 4})[1]
    assert values["vllm:spec_decode_num_accepted_tokens"] > 0
    assert not values.get("specdecode:proposer_failures")
