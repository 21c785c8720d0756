"""What the engine learns from a checkpoint's config files."""

from __future__ import annotations

import json

import pytest
import torch
from specdecode.contract import ConfigError
from specdecode.models import (
    default_sampling,
    describe_target,
    eos_token_ids,
    resolve_dtype,
    resolve_max_model_len,
    resolve_model,
)
from specdecode.testing.tiny import tiny_checkpoint

CPU = torch.device("cpu")


@pytest.fixture
def files(tmp_path):
    return lambda **options: resolve_model(tiny_checkpoint(tmp_path, **options))


@pytest.mark.parametrize(
    ("stored", "device", "want"),
    [
        ("float32", "cpu", torch.float32),
        ("bfloat16", "cpu", torch.bfloat16),
        ("float16", "cpu", torch.float32),
        ("float16", "cuda", torch.float16),
        (None, "cuda", torch.float32),
    ],
)
def test_auto_dtype_is_the_configs(files, stored, device, want):
    assert resolve_dtype("auto", files(dtype=stored).hf_config, torch.device(device)) is want


def test_a_dtype_by_name_or_by_itself(files):
    config = files().hf_config
    assert resolve_dtype("half", config, CPU) is torch.float16
    assert resolve_dtype("bfloat16", config, CPU) is torch.bfloat16
    assert resolve_dtype(torch.float32, config, CPU) is torch.float32
    for bad in ("int8", "fp32", torch.int64):
        with pytest.raises(ConfigError, match="dtype must be"):
            resolve_dtype(bad, config, CPU)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 1e4}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("rope", "limit", "default"),
    [(None, 512, 512), (YARN, 2048, 2048), (LINEAR, 2048, 2048), (DYNAMIC, 2048, 512)],
)
def test_context_length(files, rope, limit, default):
    config = files(**({"rope_parameters": rope} if rope else {})).hf_config
    assert resolve_max_model_len(None, config) == default
    assert resolve_max_model_len(limit, config) == limit
    assert resolve_max_model_len(1, config) == 1
    for bad in (0, -5, limit + 1):
        with pytest.raises(ConfigError, match=rf"max_model_len must be between 1 and {limit}.*got {bad}"):
            resolve_max_model_len(bad, config)


def test_target_info(files):
    info = describe_target(files(family="qwen3"), dtype=torch.bfloat16, device=CPU, max_model_len=99)
    assert (info.architecture, info.vocab_size, info.hidden_size) == ("Qwen3ForCausalLM", 300, 64)
    assert (info.num_layers, info.num_heads, info.num_kv_heads, info.head_dim) == (2, 4, 2, 32)
    assert (info.max_model_len, info.dtype, info.device, info.extra_layers) == (99, "bfloat16", "cpu", 0)
    assert info.config["model_type"] == "qwen3"


@pytest.mark.parametrize(
    ("generation", "config", "want"),
    [
        ({"eos_token_id": [2, 7]}, 2, (2, 7)),
        ({"eos_token_id": 5}, 2, (5,)),
        ({"eos_token_id": None}, [2, 4], (2, 4)),
        ({"eos_token_id": None}, None, ()),
    ],
)
def test_end_tokens(files, generation, config, want):
    assert eos_token_ids(files(generation=generation, eos_token_id=config)) == want


def test_end_tokens_without_generation_config(files):
    found = files()
    (found.path / "generation_config.json").unlink()
    assert eos_token_ids(found) == (2,)
    assert default_sampling(found) == {}


def test_sampling_defaults(files):
    found = files(generation={"temperature": 0.6, "top_k": 20, "top_p": None, "max_new_tokens": 5})
    assert default_sampling(found) == {"temperature": 0.6, "top_k": 20}


def test_a_damaged_generation_config(files):
    found = files()
    (found.path / "generation_config.json").write_text("[1, ")
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        eos_token_ids(found)


# -- the tiny checkpoints themselves ----------------------------------------------------------------


def test_tiny_checkpoints_are_deterministic(tmp_path):
    one, two = tiny_checkpoint(tmp_path / "one", seed=3), tiny_checkpoint(tmp_path / "two", seed=3)
    other = tiny_checkpoint(tmp_path / "other", seed=4)
    for file in one.iterdir():
        assert file.read_bytes() == (two / file.name).read_bytes(), file.name
    assert (one / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


def test_zero_outputs_make_the_law_depend_on_the_last_token(tmp_path, native, prompt):
    paged = native(tiny_checkpoint(tmp_path / "table", zero_outputs=True))
    ids = prompt(30)
    logits = paged.feed({"a": ids})[0]["a"]
    alone = paged.feed({"b": ids[-1:]})[0]["b"]
    torch.testing.assert_close(logits[-1:], alone)
    paged = native(tiny_checkpoint(tmp_path / "tiny"))
    assert (paged.feed({"a": ids})[0]["a"][-1] - paged.feed({"b": ids[-1:]})[0]["b"]).abs().max() > 0.1


def test_small_vocabularies_hold_letters(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint(tmp_path, vocab_size=8))
    assert tokenizer.decode([3, 4, 7]) == "abe"
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == 8
