"""Speculation changes no output of requests with adapters: the drafter knows none, the target decides."""

from __future__ import annotations

import pytest
from specdecode.testing.adapters import AdapterLab
from specdecode.testing.invariants import check_core

pytest.importorskip("specdec_eagle")
from specdec_eagle.testing import write_head

METHODS = ("ngram", "draft-model", "eagle3-head", "eagle-grown-tree", "suffix", "ngram-adaptive")


@pytest.fixture(scope="module")
def adapted(lab, tmp_path_factory):
    adapted = AdapterLab(tmp_path_factory.mktemp("adapters"), lab.target)
    yield adapted
    adapted.close()


@pytest.fixture(scope="module")
def configs(lab, tmp_path_factory):
    levels = [0, 1, 2]
    head = write_head(tmp_path_factory.mktemp("head") / "eagle3", "eagle3", lab.target)
    return {
        "eagle3-head": {
            "method": "eagle3",
            "model": str(head),
            "num_speculative_tokens": 3,
            "aux_layer_ids": levels,
        },
        "suffix": {"method": "suffix", "num_speculative_tokens": 6, "suffix_decoding_min_token_prob": 0.0},
        "ngram-adaptive": lab.config("ngram") | {"adaptive": True},
    } | {name: lab.config(name) for name in ("ngram", "draft-model", "eagle-grown-tree")}


@pytest.mark.parametrize("order", ["plain", "late"])
@pytest.mark.parametrize("method", METHODS)
def test_three_adapters_and_none_in_a_batch(adapted, configs, method, order):
    prompts, params = adapted.asks(max_tokens=24)
    options = {"speculative_config": configs[method], "async_scheduling": order == "late"}
    with adapted.engine(max_loras=2, num_gpu_blocks_override=60, **options) as llm:
        adapted.check(prompts, params, adapted.generate(llm, prompts, params))
        adapted.check(prompts, params, adapted.generate(llm, prompts, params))  # from what is cached
        readings = {(m.name, m.labels.get("lora_name")): m.value for m in llm.get_metrics()}
        drafted = [
            readings.get(("specdecode:lora_spec_decode_num_draft_tokens", f"adapter-{index}"), 0)
            for index in range(3)
        ]
        assert sum(drafted) <= readings["vllm:spec_decode_num_draft_tokens", None]
        assert sum(drafted) or method == "ngram-adaptive"  # which may find that none pays
        check_core(llm.llm_engine.core)
