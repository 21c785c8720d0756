"""Resolving and loading checkpoints, and what is said when they are broken."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from specdecode import LLM
from specdecode.contract import ConfigError
from specdecode.models import load_model, load_tokenizer, load_weights, resolve_model
from specdecode.testing.tiny import tiny_checkpoint

CPU = torch.device("cpu")


@pytest.fixture
def checkpoint(tmp_path):
    return tiny_checkpoint(tmp_path / "model")


def load(path, **options):
    return load_model(resolve_model(path), dtype=torch.float32, device=CPU, max_model_len=64, **options)


def rewrite(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def edit_config(path, **fields):
    config = json.loads((path / "config.json").read_text())
    config |= fields
    (path / "config.json").write_text(json.dumps(config))


def refusal(call, *args, **options):
    with pytest.raises(ConfigError) as caught:
        call(*args, **options)
    assert len(caught.value.faults) == 1
    return str(caught.value)


def test_resolving_a_directory(checkpoint):
    files = resolve_model(str(checkpoint))
    assert (files.path, files.architecture, files.source, files.gguf) == (
        checkpoint,
        "LlamaForCausalLM",
        "safetensors",
        None,
    )
    assert files.hf_config.hidden_size == 64


@pytest.mark.parametrize("tie", [False, True])
def test_sharded_and_whole_checkpoints_give_the_same_model(tmp_path, tie):
    whole = load(tiny_checkpoint(tmp_path / "whole", tie=tie))
    sharded = load(tiny_checkpoint(tmp_path / "sharded", tie=tie, shards=3))
    assert not (tmp_path / "sharded" / "model.safetensors").exists()
    for (name, one), (_, other) in zip(whole.named_parameters(), sharded.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_tied_embeddings_are_one_table(tmp_path):
    decoder = load(tiny_checkpoint(tmp_path, tie=True))
    hidden = torch.randn(3, decoder.config.hidden_size)
    torch.testing.assert_close(decoder.compute_logits(hidden), hidden @ decoder.embed_tokens.weight.t())


def test_checkpoints_of_the_bare_model_load_too(checkpoint):
    before, x = load(checkpoint), torch.randn(3, 64)
    rewrite(checkpoint, lambda t: [t.update({k.removeprefix("model."): t.pop(k)}) for k in list(t)])
    assert torch.equal(load(checkpoint).layers[0].mlp(x), before.layers[0].mlp(x))


def test_dummy_weights_are_seeded_and_read_no_file(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    one, two = load(checkpoint, load_format="dummy"), load(checkpoint, load_format="dummy")
    x = torch.randn(3, 64)
    for a, b in zip(one.layers, two.layers, strict=True):
        assert torch.equal(a.mlp(x), b.mlp(x)) and a.mlp(x).std() > 0
        assert torch.equal(a.self_attn.qkv_proj(x), b.self_attn.qkv_proj(x))
    assert torch.equal(one.embed_tokens.weight, two.embed_tokens.weight)
    files = resolve_model(checkpoint, load_format="dummy")
    assert files.architecture == "LlamaForCausalLM"


def test_load_weights(checkpoint):
    stored = load_file(checkpoint / "model.safetensors")
    assert {name: t.shape for name, t in load_weights(checkpoint)} == {
        name: t.shape for name, t in stored.items()
    }
    some = {"model.norm.weight", "lm_head.weight", "none.of.these"}
    assert {name for name, _ in load_weights(checkpoint, some)} == some & set(stored)


@pytest.mark.parametrize("model_type", ["mimo", "qwen2"])
def test_mimo_is_read_as_what_its_body_is(tmp_path, model_type, caplog):
    """transformers has no config of that name; the layers that it drafts with are no part of the body."""
    path = tiny_checkpoint(tmp_path, "qwen2")
    fields = json.loads((path / "config.json").read_text())
    plain = load(path)
    fields |= {"model_type": model_type, "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    fields |= {"auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"}, "rope_theta": 640000.0}
    del fields["rope_parameters"]
    (path / "config.json").write_text(json.dumps(fields))
    stored = load_file(path / "model.safetensors")
    save_file(
        stored | {"model.mtp_layers.0.input_proj.weight": torch.zeros(2, 2)}, path / "model.safetensors"
    )
    files = resolve_model(path)
    assert (files.architecture, files.hf_config.num_nextn_predict_layers) == ("MiMoForCausalLM", 1)
    assert files.hf_config.rope_parameters["rope_theta"] == 640000.0
    mimo = load(path)
    x = torch.randn(3, 64)
    assert torch.equal(mimo.layers[1].mlp(x), plain.layers[1].mlp(x))
    assert not caplog.records  # every tensor has its use


def test_a_hub_id_is_found_in_the_offline_cache(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--someone--tiny"
    revision = "0123456789abcdef0123456789abcdef01234567"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    (repository / "snapshots").mkdir()
    checkpoint.rename(repository / "snapshots" / revision)
    files = resolve_model("someone/tiny")
    assert (files.name, files.path) == ("someone/tiny", repository / "snapshots" / revision)
    assert resolve_model("someone/tiny", revision=revision).path == files.path
    assert "at revision 'other'" in refusal(resolve_model, "someone/tiny", revision="other")


# -- refusals ---------------------------------------------------------------------------------------


def test_a_model_that_is_nowhere(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert "does not exist" in refusal(resolve_model, str(tmp_path / "nothing"))
    assert "does not exist" in refusal(resolve_model, "nothing.gguf")
    said = refusal(resolve_model, "someone/no-such-model", revision="v9")
    assert "someone/no-such-model" in said and "offline cache" in said and "v9" in said
    assert "no file or directory" in refusal(resolve_model, "not a valid id!")


def test_a_directory_without_config(tmp_path):
    assert "config.json" in refusal(resolve_model, tmp_path)
    assert ".gguf" in refusal(resolve_model, tmp_path, load_format="gguf")
    (tmp_path / "a.gguf").touch()
    (tmp_path / "b.gguf").touch()
    assert "a.gguf, b.gguf" in refusal(resolve_model, tmp_path)


def test_a_file_of_another_kind(tmp_path):
    (tmp_path / "model.onnx").touch()
    assert "model.onnx" in refusal(resolve_model, tmp_path / "model.onnx")


def test_a_damaged_config(checkpoint):
    (checkpoint / "config.json").write_text('{"model_type": "llama", ')
    assert "config.json" in refusal(resolve_model, checkpoint)


def test_an_unknown_load_format(checkpoint):
    assert (
        refusal(resolve_model, checkpoint, load_format="pt")
        == "load_format must be one of auto, safetensors, gguf, dummy, got 'pt'"
    )


def test_an_unknown_architecture(checkpoint):
    edit_config(checkpoint, architectures=["MambaForCausalLM"])
    said = refusal(load, checkpoint)
    assert "MambaForCausalLM" in said and "Qwen3ForCausalLM" in said


def test_a_config_without_architectures_goes_by_its_model_type(checkpoint):
    edit_config(checkpoint, architectures=None)
    assert resolve_model(checkpoint).architecture == "LlamaForCausalLM"


def test_an_unknown_activation(checkpoint):
    edit_config(checkpoint, hidden_act="relu")
    assert "'relu'" in refusal(load, checkpoint)


def test_a_quantized_checkpoint_of_an_unknown_kind(checkpoint):
    edit_config(checkpoint, quantization_config={"quant_method": "quip", "bits": 4})
    assert "'quip'" in refusal(load, checkpoint)


def test_a_missing_shard(tmp_path):
    path = tiny_checkpoint(tmp_path, shards=3)
    (path / "model-00002-of-00003.safetensors").unlink()
    said = refusal(load, path)
    assert "model-00002-of-00003.safetensors is missing" in said and "index.json" in said


def test_no_weights_at_all(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    assert "load_format='dummy'" in refusal(load, checkpoint)
    (checkpoint / "pytorch_model.bin").touch()
    assert "pytorch_model.bin" in refusal(load, checkpoint)


@pytest.mark.parametrize("keep", [0, 4, 1000, -100])
def test_a_truncated_weight_file(checkpoint, keep):
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    said = refusal(load, checkpoint)
    assert "model.safetensors" in said and "truncated" in said


def test_missing_tensors(checkpoint):
    rewrite(checkpoint, lambda t: [t.pop(k) for k in list(t) if "k_proj" in k])
    said = refusal(load, checkpoint)
    assert "lacks 2 tensors" in said and "layers.1.self_attn.k_proj.weight" in said


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.1.self_attn.k_proj.weight", (16, 64)),
        ("model.layers.0.mlp.down_proj.weight", (128, 64)),
        ("model.layers.0.input_layernorm.weight", (1,)),
        ("model.embed_tokens.weight", (299, 64)),
        ("lm_head.weight", (64, 300)),
    ],
)
def test_a_tensor_of_another_shape(checkpoint, name, shape):
    rewrite(checkpoint, lambda t: t.update({name: torch.zeros(shape)}))
    said = refusal(load, checkpoint)
    assert name in said and str(list(shape)) in said and "expected shape" in said


def test_tensors_that_nobody_uses_are_told(checkpoint, caplog):
    rewrite(checkpoint, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}))
    with caplog.at_level(logging.WARNING, "specdecode"):
        load(checkpoint)
    assert "model.layers.0.self_attn.q_proj.bias" in caplog.text


# -- tokenizer --------------------------------------------------------------------------------------


def test_tokenizer_and_chat_template(checkpoint):
    tokenizer = load_tokenizer(resolve_model(checkpoint))
    text = "Größe 🙂\n\tend"
    ids = tokenizer.encode(text)
    assert ids == [byte + 3 for byte in text.encode()]
    assert tokenizer.decode(ids) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode("<|im_end|>") == [tokenizer.eos_token_id]


def test_another_tokenizer(checkpoint, tmp_path):
    other = tiny_checkpoint(tmp_path / "other", vocab_size=320)
    assert len(load_tokenizer(resolve_model(checkpoint), str(other))) == 320
    load_tokenizer(resolve_model(other)).save_pretrained(tmp_path / "alone")  # no model beside it
    assert len(load_tokenizer(resolve_model(checkpoint), str(tmp_path / "alone"))) == 320


def test_a_target_tells_of_the_tokenizer_that_cuts_its_requests(checkpoint, tmp_path):
    other = tiny_checkpoint(tmp_path / "other", vocab_size=320)
    options = {"device": "cpu", "dtype": "float32", "num_gpu_blocks_override": 16}
    with LLM(str(checkpoint), skip_tokenizer_init=True, **options) as llm:
        own = llm.llm_engine.target.tokenizer
    with LLM(str(checkpoint), tokenizer=str(other), **options) as llm:
        named = llm.llm_engine.target.tokenizer
    assert len(named.entries().tokens) == len(named.load()) == 320 > len(own.entries().tokens)
    assert own.load().encode("a") == [97 + 3]
    assert own.entries().tokens[own.load().eos_token_id] == own.load().eos_token
    assert own.load().eos_token_id in own.entries().special


def test_tokenizer_refusals(checkpoint):
    files = resolve_model(checkpoint)
    assert "'slow'" in refusal(load_tokenizer, files, mode="slow")
    for file in checkpoint.glob("tokenizer*"):
        file.unlink()
    assert "skip_tokenizer_init" in refusal(load_tokenizer, files)
