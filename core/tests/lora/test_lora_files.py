"""Adapters that cannot be served are told at the door, each fault by its name, before anything else."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from specdecode import LoRARequest, SamplingParams
from specdecode.contract import ConfigError, Unsupported
from specdecode.lora.config import read_config
from specdecode.testing.adapters import write_adapter
from specdecode.testing.tiny import tiny_checkpoint

PROMPT = {"prompt_token_ids": [5, 6, 7]}
Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def llm(lab):
    with lab.engine(max_lora_rank=16) as llm:
        yield llm


def refused(llm, path, *needles, number=77):
    with pytest.raises(ConfigError) as caught:
        llm.generate([PROMPT] * 2, lora_request=[None, LoRARequest("bad", number, str(path))], use_tqdm=False)
    for needle in needles:
        assert needle in str(caught.value), caught.value
    assert not llm.llm_engine.has_unfinished_requests()
    assert not llm.llm_engine.adapters.slots.resident or number not in [
        adapter.number for adapter in llm.llm_engine.adapters.slots.resident
    ]


@pytest.mark.parametrize(
    ("fields", "needles"),
    [
        ({"peft_type": "IA3"}, ["peft_type", "'LORA'", "'IA3'"]),
        ({"use_dora": True}, ["use_dora", "DoRA", "merge"]),
        ({"modules_to_save": ["lm_head"]}, ["modules_to_save", "lm_head"]),
        ({"bias": "lora_only"}, ["bias='lora_only'", "'none'"]),
        ({"lora_bias": True}, ["lora_bias"]),
        ({"trainable_token_indices": [1]}, ["trainable_token_indices", "embeddings"]),
        ({"layer_replication": [[0, 2]]}, ["layer_replication"]),
        ({"init_lora_weights": "pissa_niter_4"}, ["init_lora_weights='pissa_niter_4'", "base model"]),
        ({"r": 0}, ["r must be", "0"]),
        ({"r": "8"}, ["r must be", "'8'"]),
        ({"r": 17}, ["rank 17", "max_lora_rank=16", "max_lora_rank=17"]),
        ({"target_modules": None}, ["target_modules must be"]),
        ({"target_modules": "("}, ["target_modules must be", "'('"]),
        ({"target_modules": ["c_attn"]}, ["target_modules=['c_attn']", "q_proj"]),
        ({"target_modules": ["q_proj"]}, ["target_modules leaves out", "k_proj"]),
        ({"rank_pattern": {"q_proj": 32}}, ["rank 32", "max_lora_rank=16"]),
        ({"use_dora": True, "bias": "all"}, ["use_dora", "bias='all'"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_a_config_asks_for(llm, lab, tmp_path, fields, needles):
    refused(llm, write_adapter(tmp_path / "bad", lab.target, **{"rank": 8, **fields}), *needles)


def change(path, **tensors):
    file = path / "adapter_model.safetensors"
    found = load_file(file) | {name.replace("__", "."): value for name, value in tensors.items()}
    save_file({name: value for name, value in found.items() if value is not None}, file)


@pytest.mark.parametrize(
    ("name", "value", "needles"),
    [
        (f"{Q}.lora_A.weight", torch.zeros(8, 32), ["lora_A", "[8, 64]", "[8, 32]"]),
        (f"{Q}.lora_B.weight", torch.zeros(64, 4), ["lora_B", "[64, 8]", "[64, 4]"]),
        (f"{Q}.lora_B.weight", None, ["lacks", f"{Q}.lora_B.weight"]),
        (f"{Q}.lora_A.weight", torch.zeros(8, 64, dtype=torch.int32), ["lora_A", "int32"]),
        (f"{Q}.lora_magnitude_vector", torch.zeros(64), ["lora_magnitude_vector", "DoRA"]),
        ("base_model.model.lm_head.lora_A.weight", torch.zeros(8, 64), ["lm_head", "cannot be adapted"]),
        ("base_model.model.model.embed_tokens.lora_embedding_A", torch.zeros(8, 300), ["embeddings"]),
        ("base_model.model.model.layers.7.mlp.up_proj.lora_A.weight", torch.zeros(8, 64), ["layers.7"]),
        (f"{Q}.base_layer.bias", torch.zeros(64), ["bias"]),
        ("something", torch.zeros(1), ["something", "no lora_A"]),
    ],
)
def test_what_the_weights_hold(llm, lab, tmp_path, name, value, needles):
    path = write_adapter(tmp_path / "bad", lab.target)
    change(path, **{name: value})
    refused(llm, path, *needles)


def test_files_that_are_not_there_or_broken(llm, lab, tmp_path):
    refused(llm, tmp_path / "nowhere", "nowhere")
    (tmp_path / "empty").mkdir()
    refused(llm, tmp_path / "empty", "adapter_config.json", "adapter_model.safetensors")
    path = write_adapter(tmp_path / "bad", lab.target)
    (path / "adapter_config.json").write_text("{")
    refused(llm, path, "adapter_config.json", "cannot be read")
    path = write_adapter(tmp_path / "bad", lab.target)
    weights = path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    refused(llm, path, "adapter_model.safetensors", "damaged")
    weights.rename(path / "adapter_model.bin")
    refused(llm, path, "pickled", "safe_serialization")


def test_requests(llm, lab, tmp_path):
    for fields in (
        ("", 1, "x"),
        ("a", 0, "x"),
        ("a", True, "x"),
        ("a", 1, ""),
        ("a", 1, None),
        ("a\n", 1, "x"),
    ):
        with pytest.raises(ConfigError, match="must be"):
            LoRARequest(*fields)
    params = SamplingParams(max_tokens=1)
    with pytest.raises(ConfigError, match="must be a LoRARequest"):
        llm.generate(PROMPT, params, lora_request="adapter")
    with pytest.raises(ConfigError, match="2 entries for 1 prompts"):
        llm.generate(PROMPT, params, lora_request=[lab.request(0)] * 2)
    with pytest.raises(ConfigError, match=r"lora_request\[1\]"):
        llm.generate([PROMPT] * 2, params, lora_request=[None, 3])
    llm.generate(PROMPT, params, lora_request=lab.request(0), use_tqdm=False)
    with pytest.raises(ConfigError, match="lora_int_id=1 is adapter 'adapter-0'"):
        llm.generate(PROMPT, params, lora_request=LoRARequest("other", 1, str(lab.paths[1])))
    path = write_adapter(tmp_path / "own", lab.target)
    request = LoRARequest("own", 5, str(path))
    assert llm.llm_engine.add_lora(request)
    write_adapter(path, lab.target, seed=3, rank=4)
    with pytest.raises(ConfigError, match="changed since lora_int_id=5"):
        llm.generate(PROMPT, params, lora_request=request)


def test_models_of_transformers_have_no_room(tmp_path):
    from specdecode import LLM

    path = tiny_checkpoint(tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(
        json.dumps(config | {"architectures": ["OlmoForCausalLM"], "model_type": "olmo"})
    )
    with pytest.raises(
        Unsupported, match=r"enable_lora=True works with the native decoder, and OlmoForCausalLM"
    ):
        LLM(str(path), enable_lora=True, device="cpu", load_format="dummy")


def test_scales_and_selection(tmp_path):
    def config(**fields):
        known = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
        (tmp_path / "adapter_config.json").write_text(json.dumps(known | fields))
        return read_config(tmp_path)

    module = "model.layers.1.self_attn.q_proj"
    assert config().scale_of(module) == 2 and config().selects(module)
    assert config(use_rslora=True).scale_of(module) == pytest.approx(16 / 8**0.5)
    patterned = config(
        rank_pattern={"layers.1.self_attn.q_proj": 4}, alpha_pattern={r"layers\.\d+\..*q_proj": 2}
    )
    assert patterned.rank_of(module) == 4 and patterned.scale_of(module) == 0.5
    assert patterned.rank_of("model.layers.11.self_attn.q_proj") == 8
    assert not config(target_modules=["proj"]).selects(module)
    assert config(target_modules=r".*layers\.[01]\.self_attn\.(q|k)_proj").selects(module)
    assert not config(target_modules=r"q_proj").selects(module)
    assert config(target_modules="all-linear").selects(module)
    assert not config(exclude_modules=["layers.1.self_attn.q_proj"]).selects(module)
    assert not config(layers_to_transform=[0]).selects(module) and config(layers_to_transform=1).selects(
        module
    )
