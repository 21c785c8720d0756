"""Mixtures of experts: no method changes their output, in any batch, however prompts are cut."""

from __future__ import annotations

import pytest
from specdecode.testing.lossless import Engine, requests
from specdecode.testing.tiny import tiny_checkpoint

FAMILIES = ["qwen3-moe", "mixtral"]
METHODS = ["ngram", "draft_model", "eagle3"]


@pytest.fixture(scope="module", params=FAMILIES)
def models(request, tmp_path_factory):
    """A target, a draft model that guesses now and then, and an EAGLE-3 head."""
    from specdec_eagle.testing import write_head

    root = tmp_path_factory.mktemp(request.param)
    same = {"output_scale": 0.3, "max_position_embeddings": 256}
    target = tiny_checkpoint(root / "target", request.param, num_hidden_layers=4, **same)
    draft = tiny_checkpoint(root / "draft", request.param, num_hidden_layers=1, **same)
    head = write_head(root / "eagle3", "eagle3", target)
    return {
        "target": target,
        "ngram": {"method": "ngram", "num_speculative_tokens": 4},
        "draft_model": {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3},
        "eagle3": {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3},
    }


@pytest.fixture(scope="module")
def plain(models):
    """Outputs without speculation, one request at a time, prompts in one piece."""
    prompts, params = requests(8)
    prompts[0] = [40, 41, 42] * 6
    alone = Engine(models["target"], max_num_seqs=1, max_num_batched_tokens=96)
    return prompts, params, alone(prompts, params)


@pytest.mark.parametrize("order", ["plain", "late"])
@pytest.mark.parametrize("method", METHODS)
def test_output_is_that_of_plain_decoding(models, plain, method, order):
    prompts, params, want = plain
    for options in ({"max_num_seqs": 8, "max_num_batched_tokens": 24}, {"max_num_seqs": 1}):
        engine = Engine(models["target"], models[method], order, **options)
        assert engine(prompts, params) == want, options
        assert engine.accepted > 0


def test_a_batch_and_cut_prompts(models, plain):
    prompts, params, want = plain
    assert Engine(models["target"], max_num_batched_tokens=16)(prompts, params) == want
