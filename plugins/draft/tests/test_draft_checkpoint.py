"""Checkpoints that a draft can be, and faults of them that are found before a weight is read."""

import shutil
from pathlib import Path

import pytest
import torch
from specdec_draft.checkpoint import describe, looks_like_a_language_model
from specdecode.contract import ConfigError, SpecdecodeError
from specdecode.plugins import read_checkpoint
from specdecode.testing.tiny import FAMILIES, tiny_checkpoint


@pytest.fixture
def copy(target, tmp_path):
    return Path(shutil.copytree(target, tmp_path / "copy"))


@pytest.mark.parametrize("family", [*FAMILIES, "mimo"])
def test_every_native_family_passes_as_core_loads_it(kit, family, tmp_path):
    from specdecode.models import describe_target, load_model, resolve_model

    path = tiny_checkpoint(tmp_path, "qwen2" if family == "mimo" else family)
    if family == "mimo":  # Qwen2 by another name
        kit.edit(path, model_type="mimo", architectures=["MiMoForCausalLM"])
    assert looks_like_a_language_model(read_checkpoint(path))
    shape, files = describe(read_checkpoint(path)), resolve_model(path)
    info = describe_target(files, dtype=torch.float32, device=torch.device("cpu"), max_model_len=64)
    assert (shape.layers, shape.heads, shape.head_dim) == (info.num_layers, info.num_kv_heads, info.head_dim)
    assert shape.native and shape.vocab_size == info.vocab_size and shape.context == 512
    load_model(files, dtype=torch.float32, device=torch.device("cpu"), max_model_len=64)


def without(name):
    return lambda tensors: tensors.pop(name)


def narrower(tensors):
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:, :32].contiguous()


QUERY = "model.layers.1.self_attn.q_proj.weight"
FAULTS = {
    "missing-tensor": (without(QUERY), {}, r"lacks layers\.1\.self_attn\.q_proj\.weight \(1 tensors\)"),
    "missing-head": (without("lm_head.weight"), {}, r"lacks lm_head\.weight"),
    "wrong-hidden-size": (narrower, {}, r"embed_tokens\.weight is \[300, 32\] instead of \[300, 64\]"),
    "config-of-another": (None, {"hidden_size": 128}, r"does not fit its config\.json: .*, \.\.\. \("),
    "no-size": (None, {"num_attention_heads": None}, "config.json has no num_attention_heads"),
    "no-number": (None, {"hidden_size": "64"}, "hidden_size of config.json must be a positive integer"),
    "activation": (None, {"hidden_act": "relu6"}, "hidden_act 'relu6' is not supported"),
    "rope": (None, {"rope_parameters": {"rope_type": "spiral"}}, "rope_type 'spiral' is not supported"),
    "quantized": (None, {"quantization_config": {"quant_method": "quip"}}, r"is quantized by 'quip'"),
    "architecture": (None, {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "not supported"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_told_before_the_target_is_loaded(kit, llm_of, target, copy, monkeypatch, name):
    from specdecode import models

    monkeypatch.setattr(models, "load_model", lambda *_, **__: pytest.fail("weights were loaded"))
    change, config, message = FAULTS[name]
    if change is not None:
        kit.retensor(copy, change)
    kit.edit(copy, **config)
    with pytest.raises(SpecdecodeError, match=message):
        llm_of(target, copy)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"max_model_len": 513},
            "max_model_len of the draft must be at most 512, its context length, got 513",
        ),
        ({"draft_tensor_parallel_size": 2}, "must be 1 or the target's 1, got 2"),
        ({"quantization": "int8", "dtype": "float32"}, "works on a CPU, in bfloat16"),
        ({"quantization": "awq"}, r"speculative_config\.quantization must be .*int8"),
        ({"dtype": "int4"}, r"speculative_config\.dtype must be .*bfloat16"),
        ({"draft_sample_method": "best"}, r"speculative_config\.draft_sample_method must be"),
        ({"drafts": 3}, r"speculative_config\.drafts"),
    ],
)
def test_keys_that_cannot_be(llm_of, target, copy, spec, message):
    with pytest.raises(SpecdecodeError, match=message):
        llm_of(target, copy, spec=spec)


def test_a_file_that_is_none(llm_of, target, tmp_path):
    with pytest.raises(ConfigError, match=r"nothing' does not exist; give the directory that holds it$"):
        llm_of(target, tmp_path / "nothing")
    with pytest.raises(
        ConfigError, match=r"neither a directory nor in the local hub cache.*hf download no/such"
    ):
        llm_of(target, "no/such")


def test_a_checkpoint_is_recognised_and_a_head_is_not(kit, llm_of, target, copy):
    from specdecode import LLM

    with LLM(
        str(target), dtype="float32", device="cpu", max_model_len=64,
        speculative_config={"model": str(copy), "num_speculative_tokens": 3},
    ) as llm:  # fmt: skip
        assert llm.llm_engine.method == "draft_model"
    assert looks_like_a_language_model(read_checkpoint(copy)) == "a whole LlamaForCausalLM"
    kit.retensor(copy, lambda tensors: tensors.update({"fc.weight": torch.zeros(64, 128)}))
    assert looks_like_a_language_model(read_checkpoint(copy)) is None


def test_two_loads_draft_the_same(kit, llm_of, target, draft):
    asks = [kit.ask(range(30, 40), temperature=t, seed=2, max_tokens=50) for t in (0, 1.0)]
    runs = [
        [(o.metrics.drafted, o.metrics.accepted) for o in kit.generate(llm_of(target, draft), asks)]
        for _ in range(2)
    ]
    assert runs[0] == runs[1] and all(accepted for _, accepted in runs[0])


def test_a_draft_of_random_weights_beside_a_target_of_such(kit, llm_of, target, tmp_path):
    """``load_format="dummy"`` needs a config alone, of both."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        folder.mkdir()
        shutil.copy(target / "config.json", folder)
    kit.edit(theirs, num_hidden_layers=1)
    asks = [kit.ask(range(9, 14), temperature=t, seed=1, max_tokens=20) for t in (0, 1.0)]
    llm = llm_of(ours, theirs, 3, load_format="dummy")
    outputs = kit.generate(llm, asks)
    assert kit.ids(outputs) == kit.ids(kit.generate(llm_of(ours, load_format="dummy"), asks))
    assert all(output.metrics.drafted > 10 for output in outputs)
    with pytest.raises(ConfigError, match="safetensors"):
        llm_of(target, theirs)
