"""A head of which there is a config alone: random weights in its shapes, so that it can be timed."""

from __future__ import annotations

import json
import shutil

import pytest
from specdec_eagle.testing import write_head
from specdecode import LLM, SamplingParams
from specdecode.contract import ConfigError
from specdecode.plugins import default_manager, prepare, read_checkpoint

KEYS = {"num_speculative_tokens": 3}
AUX = {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
HEADS = [
    ("eagle", {}),
    ("eagle3", {}),
    ("eagle3", {"draft_vocab": 40}),
    ("eagle3-speculators", {"draft_vocab": 40, "layers": 2}),
]


def written(folder, layout, target, **options):
    """A checkpoint with its weights, and the same without."""
    whole = write_head(folder / "whole", layout, target, **options)
    bare = folder / "bare"
    bare.mkdir()
    shutil.copy(whole / "config.json", bare)
    return whole, bare


def dummy(path, revision=None, *, field=""):
    return read_checkpoint(path, revision, field=field, dummy=True)


@pytest.mark.parametrize(("layout", "options"), HEADS)
def test_it_needs_what_the_head_with_weights_needs(target, info, tmp_path, layout, options):
    whole, bare = written(tmp_path, layout, target, **options)
    method = layout.split("-")[0]
    needs = [
        prepare(default_manager(), {"method": method, "model": str(path), **KEYS}, info, reader=reader).needs
        for path, reader in ((whole, read_checkpoint), (bare, dummy))
    ]
    assert needs[0] == needs[1]


@pytest.mark.parametrize(("layout", "options"), HEADS)
def test_it_runs_beside_a_target_of_random_weights(target, tmp_path, layout, options):
    _, bare = written(tmp_path, layout, target, **options)
    model = tmp_path / "target"
    model.mkdir()
    shutil.copy(target / "config.json", model)
    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    prompt = [{"prompt_token_ids": [5, 6, 7]}]
    engine = {
        "device": "cpu",
        "dtype": "float32",
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 64,
        "num_gpu_blocks_override": 40,
    }
    outputs = []
    for config in (None, {"method": layout.split("-")[0], "model": str(bare), **KEYS}):
        with LLM(str(model), speculative_config=config, **engine) as llm:
            outputs.append(list(llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids))
            values = {metric.name: metric.value for metric in llm.get_metrics()}
    assert outputs[0] == outputs[1]
    assert values["vllm:spec_decode_num_draft_tokens"] > 10 and not values["specdecode:proposer_failures"]


def test_without_dummy_weights_a_head_must_have_some(target, info, tmp_path):
    _, bare = written(tmp_path, "eagle3", target)
    with pytest.raises(ConfigError, match="safetensors"):
        prepare(default_manager(), {"method": "eagle3", "model": str(bare), **KEYS}, info)


@pytest.mark.parametrize("field", ["hidden_size", "intermediate_size"])
def test_a_config_that_does_not_tell_the_shapes_is_named(target, info, tmp_path, field):
    _, bare = written(tmp_path, "eagle3", target)
    config = json.loads((bare / "config.json").read_text("utf-8"))
    del config[field]
    (bare / "config.json").write_text(json.dumps(config), "utf-8")
    with pytest.raises(ConfigError, match=r"config\.json of .* lacks hidden_size or intermediate_size"):
        prepare(default_manager(), {"method": "eagle3", "model": str(bare), **KEYS}, info, reader=dummy)
