"""Quantised checkpoints in every layout: the weights that they mean, and what is refused."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from specdecode import LLM, SamplingParams
from specdecode.contract import ConfigError
from specdecode.layers.linear import Linear
from specdecode.models import load_model, resolve_dtype, resolve_model, weight_bytes
from specdecode.models.fused import SWITCH
from specdecode.testing.quantized import LAYOUTS, quantized_checkpoint

CPU = torch.device("cpu")


def load(path, **options):
    options = {"dtype": torch.float32, "device": CPU, "max_model_len": 64} | options
    return load_model(resolve_model(path, load_format=options.get("load_format", "auto")), **options)


def edit_config(path, change):
    file = path / "config.json"
    config = json.loads(file.read_text())
    change(config["quantization_config"])
    file.write_text(json.dumps(config))


def linears(decoder):
    return {name: module for name, module in decoder.named_modules() if isinstance(module, Linear)}


@pytest.mark.parametrize("fused", ["0", "1"], ids=["layers", "fused"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_those_of_the_dense_model(layout, fused, tmp_path, native, reference, prompt, monkeypatch):
    """Beside transformers, in float32, on the weights that the codes mean."""
    monkeypatch.setenv(SWITCH, fused)
    quantised, dense = quantized_checkpoint(tmp_path, layout, "qwen2" if layout == "gptq" else "llama")
    model, ids = native(quantised), prompt(40)
    got, _ = model.feed({"a": ids})
    expected = reference(dense)(ids).logits[0]
    assert expected.std() > 0.5
    torch.testing.assert_close(got["a"], expected, atol=2e-4, rtol=0)
    held = [module.packed for name, module in linears(model.decoder).items() if name != "lm_head"]
    assert all(held) or (fused == "1" and model.decoder.device == CPU)


def test_weights_take_the_memory_of_their_codes(tmp_path, monkeypatch):
    monkeypatch.setenv(SWITCH, "1")
    sizes = {"hidden_size": 256, "intermediate_size": 512}
    for layout, most in (("compressed-int4", 0.18), ("fp8", 0.27), ("compressed-int8-channel", 0.27)):
        quantised, dense = quantized_checkpoint(tmp_path / layout, layout, **sizes)
        plain, held = load(dense), load(quantised)
        rest = sum(module.num_bytes for name, module in linears(plain).items() if name == "lm_head")
        rest += plain.embed_tokens.weight.nbytes
        assert weight_bytes(held) - rest < most * (weight_bytes(plain) - rest)


@pytest.mark.parametrize("left", ["down_proj", "q_proj"])
def test_some_modules_stay_as_they_are(left, tmp_path, native, reference, prompt, caplog, monkeypatch):
    """A module, or a part of one: then the whole of it is dense, and a warning tells."""
    quantised, dense = quantized_checkpoint(tmp_path, "compressed-int4", plain=("lm_head", left))
    monkeypatch.setenv(SWITCH, "1")  # on a CPU, the layers pack what is dense
    ids = prompt(20)
    with caplog.at_level(logging.WARNING):
        model = native(quantised)
    got, _ = model.feed({"a": ids})
    torch.testing.assert_close(got["a"], reference(dense)(ids).logits[0], atol=2e-4, rtol=0)
    packed = {
        name.split(".")[-1] for name, module in linears(model.decoder).items() if module.weight.numel() == 0
    }
    assert ("qkv_proj" in packed) == (left != "q_proj") and "gate_up_proj" in packed
    assert any("2 layers are dequantised" in record.message for record in caplog.records) == (
        left == "q_proj"
    )


def test_an_output_layer_may_be_quantised(tmp_path, native, reference, prompt):
    quantised, dense = quantized_checkpoint(tmp_path, "compressed-int8-channel", plain=())
    ids = prompt(20)
    model = native(quantised)
    assert model.decoder.lm_head.weight.numel() == 0
    got, _ = model.feed({"a": ids})
    torch.testing.assert_close(got["a"], reference(dense)(ids).logits[0], atol=5e-4, rtol=0)


@pytest.mark.parametrize("layout", ["awq", "fp8-block", "compressed-int8-channel"])
def test_dummy_weights_are_quantised_too(layout, tmp_path):
    quantised, _ = quantized_checkpoint(tmp_path, layout)
    (quantised / "model.safetensors").unlink()
    one, two = (load(quantised, load_format="dummy") for _ in range(2))
    x = torch.randn(3, 64)
    for a, b in zip(one.layers, two.layers, strict=True):
        assert torch.equal(a.mlp(x), b.mlp(x)) and a.mlp(x).std() > 0
        assert a.mlp.down_proj.packed and 0.01 < a.self_attn.qkv_proj(x).std() / x.std() / 8 < 0.04
    assert one.compute_logits(x).std() > 0.05


def test_float16_of_a_quantised_checkpoint_is_bfloat16(tmp_path):
    quantised, dense = quantized_checkpoint(tmp_path, "awq", dtype="float16")
    configs = resolve_model(quantised).hf_config, resolve_model(dense).hf_config
    for device, plain in (("cpu", torch.float32), ("cuda", torch.float16)):
        wanted = [resolve_dtype("auto", config, torch.device(device)) for config in configs]
        assert wanted == [torch.bfloat16, plain]
    assert resolve_dtype("float16", configs[0], CPU) is torch.float16


def test_scales_that_are_not_needed_are_no_surprise(tmp_path, caplog):
    quantised, _ = quantized_checkpoint(tmp_path, "fp8")
    file = quantised / "model.safetensors"
    tensors = load_file(file)
    for name in ("self_attn.q_proj.input_scale", "self_attn.k_proj.k_scale"):
        tensors[f"model.layers.0.{name}"] = torch.ones(1)
    save_file(tensors, file, metadata={"format": "pt"})
    load(quantised)
    assert not caplog.records


REFUSED = {
    "bitsandbytes": ("awq", lambda c: c.update(quant_method="bitsandbytes"), ["bitsandbytes", "awq", "gptq"]),
    "three bits": ("gptq", lambda c: c.update(bits=3), ["gptq", "bits is 3", "4 or 8"]),
    "marlin": ("gptq", lambda c: c.update(checkpoint_format="marlin"), ["checkpoint_format", "marlin"]),
    "dynamic": ("gptq", lambda c: c.update(dynamic={"+:.*": {"bits": 8}}), ["dynamic"]),
    "gemv": ("awq", lambda c: c.update(version="gemv"), ["version is 'gemv'", "gemm"]),
    "e5m2": ("fp8", lambda c: c.update(fmt="e5m2"), ["fmt is 'e5m2'", "e4m3"]),
    "blocks": ("fp8", lambda c: c.update(weight_block_size=[128]), ["weight_block_size", "two numbers"]),
    "sparse": (
        "compressed-int4",
        lambda c: c.update(sparsity_config={"format": "sparse-24-bitmask"}),
        ["format is 'sparse-24-bitmask'"],
    ),
    "nvfp4": (
        "compressed-int4",
        lambda c: c.update(format="nvfp4-pack-quantized"),
        ["nvfp4", "pack-quantized"],
    ),
    "no groups": ("compressed-int4", lambda c: c.update(config_groups={}), ["config_groups is empty"]),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_read_is_refused_by_name(what, tmp_path):
    layout, change, needles = REFUSED[what]
    quantised, _ = quantized_checkpoint(tmp_path, layout)
    edit_config(quantised, change)
    with pytest.raises(ConfigError) as caught:
        load(quantised)
    said = str(caught.value)
    assert all(needle in said for needle in [*needles, "use a"]), said


@pytest.mark.parametrize(
    ("layout", "change", "needle"),
    [
        ("awq", lambda c: c.update(group_size=16), "qzeros must be"),
        (
            "compressed-int4",
            lambda c: c["config_groups"]["group_0"]["weights"].update(group_size=64),
            "weight_scale",
        ),
        ("fp8-block", lambda c: c.update(weight_block_size=[64, 64]), "weight_scale_inv must be"),
    ],
)
def test_tensors_of_another_config(layout, change, needle, tmp_path):
    quantised, _ = quantized_checkpoint(tmp_path, layout)
    edit_config(quantised, change)
    with pytest.raises(ConfigError, match="does not fit its quantization_config") as caught:
        load(quantised)
    assert needle in str(caught.value) and "self_attn.q_proj" in str(caught.value)


def test_a_missing_scale(tmp_path):
    quantised, _ = quantized_checkpoint(tmp_path, "awq")
    file = quantised / "model.safetensors"
    tensors = load_file(file)
    tensors.pop("model.layers.1.mlp.down_proj.scales")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"layers.1.mlp.down_proj.* 'scales' is missing"):
        load(quantised)


def test_the_keyword_may_say_what_the_checkpoint_says(tmp_path):
    quantised, dense = quantized_checkpoint(tmp_path, "awq", "llama")
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)

    def run(quantization):
        options = {"dtype": torch.float32, "device": "cpu", "max_model_len": 64}
        with LLM(quantised, quantization=quantization, **options) as llm:
            return llm.generate([5, 6, 7], params, use_tqdm=False)[0].outputs[0].token_ids

    assert run("awq") == run(None)
    with pytest.raises(ConfigError, match=r"quantization='gptq' says .* is quantized by 'awq': leave quant"):
        run("gptq")
    with pytest.raises(ConfigError, match=r"quantization='awq' says .* is not quantized: leave quantization"):
        LLM(dense, quantization="awq")
