"""Faults of a checkpoint: each named, and before any weight of the target is loaded."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
import torch
from specdec_mtp.layouts import recognize
from specdec_mtp.testing import write_modules, write_target
from specdecode import LLM
from specdecode.contract import ConfigError, TargetInfo, TensorInfo, Unsupported
from specdecode.models import describe_target, resolve_model
from specdecode.plugins import default_manager, prepare, read_checkpoint
from specdecode.testing.tiny import tiny_checkpoint

M, N = "model.mtp_layers.0.", "model.layers.2."
MTP = {"method": "mtp"}


def described(path) -> TargetInfo:
    return describe_target(
        resolve_model(str(path)), dtype=torch.float32, device=torch.device("cpu"), max_model_len=96
    )


FAULTS = [
    # layout, options, error, what it says
    ("mimo", {"drop": (f"{M}input_proj.weight",)}, ConfigError, ["lacks 1", "projection.weight"]),
    ("mimo", {"drop": (f"{M}final_layernorm.weight",)}, ConfigError, ["lacks 1", "final_norm.weight"]),
    ("mimo", {"drop": (f"{M}mlp.up_proj.weight",)}, ConfigError, ["lacks 1", "block.mlp.up_proj.weight"]),
    ("mimo", {"drop": (f"{M}self_attn.k_proj.bias",)}, ConfigError, ["lacks 1", "k_proj.bias"]),
    ("glm4_moe", {"drop": (f"{N}eh_proj.weight",)}, ConfigError, ["lacks 1", "projection.weight"]),
    ("glm4_moe", {"drop": (f"{N}mlp.experts.3.up_proj.weight",)}, ConfigError, ["experts.3.up_proj"]),
    ("deepseek_v3", {"drop": (f"{N}self_attn.kv_b_proj.weight",)}, ConfigError, ["kv_b_proj"]),
    ("deepseek_v3", {"drop": (f"{N}shared_head.norm.weight",)}, ConfigError, ["final_norm.weight"]),
    ("mimo", {"num_nextn_predict_layers": 2}, ConfigError, ["holds 1", "announces 2"]),
    # shapes
    (
        "mimo",
        {"tensors": {f"{M}input_proj.weight": torch.zeros(64, 96)}},
        ConfigError,
        ["[64, 96]", "[64, 128]"],
    ),
    ("mimo", {"tensors": {f"{M}hidden_layernorm.weight": torch.zeros(48)}}, ConfigError, ["[48]", "[64]"]),
    (
        "mimo",
        {"tensors": {f"{M}mlp.up_proj.weight": torch.zeros(3, 64)}},
        ConfigError,
        ["[3, 64]", "[128, 64]"],
    ),
    ("mimo", {"tensors": {f"{M}self_attn.q_proj.weight": torch.zeros(50, 64)}}, ConfigError, ["50 rows"]),
    ("glm4_moe", {"tensors": {f"{N}self_attn.k_proj.weight": torch.zeros(9, 64)}}, ConfigError, ["[9, 64]"]),
    # what does not belong
    ("mimo", {"tensors": {f"{M}surprise.weight": torch.zeros(2)}}, ConfigError, [f"{M}surprise.weight"]),
    ("glm4_moe", {"tensors": {f"{N}surprise.weight": torch.zeros(2)}}, ConfigError, [f"{N}surprise.weight"]),
    (
        "mimo",
        {"tensors": {"mtp_layers.0.input_proj.weight": torch.zeros(64, 128)}},
        ConfigError,
        ["mean the same"],
    ),
    # variants out of scope, by name
    (
        "mimo",
        {"tensors": {"mtp.fc.weight": torch.zeros(64, 128)}},
        Unsupported,
        ["Qwen3-Next", "rolled back"],
    ),
    (
        "mimo",
        {"tensors": {"mtp.pre_fc_norm_hidden.weight": torch.zeros(64)}},
        Unsupported,
        ["recurrent state"],
    ),
    ("mimo", {"tensors": {"model.mtp.layers.0.eh_proj.weight": torch.zeros(2, 2)}}, Unsupported, ["MiMo-V2"]),
    ("mimo", {"tensors": {"mtp.0.e_proj.weight": torch.zeros(2, 2)}}, Unsupported, ["DeepSeek-V4"]),
    (
        "mimo",
        {"tensors": {"model.mtp_block.0.mlp.up_proj.weight": torch.zeros(2, 2)}},
        Unsupported,
        ["ERNIE"],
    ),
    (
        "deepseek_v3",
        {"tensors": {f"{N}self_attn.indexer.wk.weight": torch.zeros(2, 2)}},
        Unsupported,
        ["indexer", "DeepSeek-V3.2"],
    ),
    (
        "deepseek_v3",
        {"tensors": {f"{N}self_attn.o_proj.weight_scale_inv": torch.zeros(2, 2)}},
        Unsupported,
        ["quantized"],
    ),
    (
        "mimo",
        {"tensors": {f"{M}self_attn.q_proj.weight": torch.zeros(128, 64)}, "head_dim": 16},
        Unsupported,
        ["gated attention"],
    ),
]


@pytest.mark.parametrize(("layout", "options", "error", "told"), FAULTS)
def test_a_fault_of_the_checkpoint_is_named(layout, options, error, told, tmp_path):
    path = write_target(tmp_path / "target", layout, **options)
    with pytest.raises(error) as raised:
        prepare(default_manager(), MTP, described(path))
    assert all(text in str(raised.value) for text in [*told, str(path)]), str(raised.value)


@pytest.mark.parametrize("layout", ["mimo", "glm4_moe"])
def test_layers_that_are_announced_and_missing(layout, tmp_path):
    """As of uploads that were quantized or saved anew; before the target is loaded."""
    whole = write_target(tmp_path / "whole", layout)
    lost = tuple(name for name in read_checkpoint(whole).tensors if name.startswith((M, N)))
    path = write_target(tmp_path / "lost", layout, drop=lost)
    with pytest.raises(
        ConfigError, match="holds no tensors of the 1 multi-token-prediction layers"
    ) as raised:
        prepare(default_manager(), MTP, described(path))
    assert "use the original checkpoint" in str(raised.value)
    assert prepare(default_manager(), MTP | {"model": str(whole)}, described(path)).needs.width == 1


def test_a_target_without_any(tmp_path):
    path = tiny_checkpoint(tmp_path / "target")
    with pytest.raises(Unsupported, match="carries no multi-token-prediction layers") as raised:
        prepare(default_manager(), MTP, described(path))
    assert "speculative_config.model" in str(raised.value)
    with pytest.raises(Unsupported, match="holds no multi-token-prediction layers"):
        prepare(default_manager(), MTP | {"model": str(path)}, described(path))


def test_modules_that_are_missing_in_between(tmp_path):
    lost = [name for name in _tensors(tmp_path) if name.startswith("model.mtp_layers.1.")]
    path = write_target(tmp_path / "lost", modules=3, drop=tuple(lost))
    with pytest.raises(ConfigError, match=r"layers \[0, 2\], not those in between"):
        prepare(default_manager(), MTP, described(path))


def _tensors(tmp_path: Path):
    return read_checkpoint(write_target(tmp_path / "whole", modules=3)).tensors


def test_faults_come_before_the_targets_weights(tmp_path, monkeypatch):
    from specdecode import models

    monkeypatch.setattr(models, "load_model", lambda *_, **__: pytest.fail("the target was loaded"))
    path = write_target(tmp_path / "target", drop=(f"{M}input_proj.weight",))
    with pytest.raises(ConfigError, match="lacks 1 tensors of a multi-token-prediction layer"):
        LLM(str(path), device="cpu", speculative_config=MTP)


# -- layers alone -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("layout", "options", "error", "told"),
    [
        ("mimo", {"vocab_size": 500}, ConfigError, ["another target", "500", "300"]),
        ("mimo", {"hidden_size": 48}, ConfigError, ["hidden_size", "48", "64"]),
        ("speculators", {"speculators_model_type": "eagle3"}, Unsupported, ["'eagle3'", "'mtp'"]),
        ("speculators", {"transformer_layer_config": None}, ConfigError, ["lacks transformer_layer_config"]),
        (
            "speculators",
            {"transformer_layer_config": {"model_type": "qwen3_next"}},
            Unsupported,
            ["qwen3_next", "rolled back"],
        ),
        (
            "speculators",
            {"transformer_layer_config": {"model_type": "gemma3_text"}},
            Unsupported,
            ["'gemma3_text'", "qwen3"],
        ),
        (
            "speculators",
            {"transformer_layer_config": {"hidden_act": "relu"}},
            Unsupported,
            ["hidden_act 'relu'"],
        ),
        (
            "speculators",
            {"transformer_layer_config": {"rope_parameters": {"rope_type": "spiral"}}},
            Unsupported,
            ["rope_type 'spiral'"],
        ),
        (
            "speculators",
            {"transformer_layer_config": {"num_attention_heads": -4}},
            ConfigError,
            ["num_attention_heads", "-4"],
        ),
    ],
)
def test_a_fault_of_layers_alone_is_named(layout, options, error, told, tmp_path):
    target = tiny_checkpoint(tmp_path / "target")
    path = write_modules(tmp_path / "layers", target, layout, **options)
    with pytest.raises(error) as raised:
        prepare(default_manager(), MTP | {"model": str(path)}, described(target))
    assert all(text in str(raised.value) for text in [*told, str(path)]), str(raised.value)


@pytest.mark.parametrize("layout", ["mimo", "speculators"])
def test_layers_alone_are_recognised(layout, tmp_path):
    target = tiny_checkpoint(tmp_path / "target")
    path = write_modules(tmp_path / "layers", target, layout)
    assert default_manager().recognize(read_checkpoint(path)).spec.name == "mtp"


def test_a_whole_model_is_no_drafter_of_this_kind(tmp_path):
    for path in (write_target(tmp_path / "mimo"), tiny_checkpoint(tmp_path / "plain")):
        assert recognize(read_checkpoint(path)) is None


def test_the_layers_of_qwen3_next_are_refused_with_the_reason(target, info):
    """By their names, beside a body that cannot run here."""
    headers = {"mtp.fc.weight": TensorInfo((64, 128), "float32")}
    headers |= read_checkpoint(target).tensors

    def reader(path, revision=None, *, field=""):
        return attrs.evolve(read_checkpoint(path), tensors=headers)

    with pytest.raises(Unsupported, match=r"linear-attention layers .* cannot be rolled back"):
        prepare(default_manager(), MTP, info, reader=reader)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"num_speculative_tokens": 0}, "between 1 and 1024"),
        ({"quantization": "int8"}, "not quantized"),
        ({"draft_tensor_parallel_size": 2}, "must be 1"),
        ({"dtype": "float16"}, "must be the target's 'float32'"),
        ({"mtp_hidden_states": "norm"}, "mtp_hidden_states"),
        ({"num_speculative_token": 1}, "num_speculative_tokens"),
    ],
)
def test_a_fault_of_the_configuration_is_named(keys, told, info):
    with pytest.raises(ConfigError) as raised:
        prepare(default_manager(), MTP | keys, info)
    assert told in str(raised.value)


def test_spellings_of_vllm(info):
    assert prepare(default_manager(), {"method": "mtp", "num_speculative_tokens": 2}, info).needs.width == 2
