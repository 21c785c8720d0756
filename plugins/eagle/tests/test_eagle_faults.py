"""Faults of a checkpoint: each named, and before any weight of the target is loaded."""

from __future__ import annotations

import json

import pytest
import torch
from specdec_eagle.testing import write_head
from specdecode import LLM
from specdecode.contract import ConfigError, Unsupported
from specdecode.plugins import default_manager, prepare

Q = "midlayer.self_attn.q_proj.weight"
MAP = {"d2t": torch.zeros(40, dtype=torch.int64)}
LAST = torch.zeros(40, dtype=torch.int64).index_fill_(0, torch.tensor([39]), 261)

FAULTS = [
    # layout, options, error, what it says
    ("eagle3", {"drop": (Q,)}, ConfigError, ["lacks 1 tensors", "layers.0.self_attn.q_proj.weight"]),
    (
        "eagle3",
        {"drop": ("norm.weight", "midlayer.hidden_norm.weight")},
        ConfigError,
        ["lacks 2", "norm.weight"],
    ),
    ("eagle", {"drop": ("layers.0.mlp.up_proj.weight",)}, ConfigError, ["lacks 1", "mlp.up_proj"]),
    ("eagle", {"hidden_size": 48}, ConfigError, ["hidden size 48", "the target 64"]),
    ("eagle3", {"hidden_size": 48, "lm_head": True}, ConfigError, ["hidden size 48", "embed_tokens.weight"]),
    ("eagle3", {"target_hidden_size": 128}, ConfigError, ["hidden size 128", "this one has 64"]),
    ("eagle3", {"taps": 2}, ConfigError, ["fc.weight has shape [64, 128]", "[64, 192]"]),
    ("eagle3", {"num_hidden_layers": 2}, ConfigError, ["lacks", "layers.1.self_attn.q_proj.weight"]),
    ("eagle3", {"num_attention_heads": 3}, ConfigError, ["num_attention_heads 3"]),
    ("eagle3", {"head_dim": 32}, ConfigError, ["head_dim 32"]),
    (
        "eagle3",
        {"tensors": {"midlayer.mlp.up_proj.weight": torch.zeros(3, 64)}},
        ConfigError,
        ["up_proj", "[3, 64]"],
    ),
    ("eagle3", {"vocab_size": 500}, ConfigError, ["another vocabulary", "500", "300"]),
    # maps
    (
        "eagle3",
        {"draft_vocab": 40, "tensors": {"d2t": LAST}},
        ConfigError,
        ["d2t maps draft id 39 to 300", "300"],
    ),
    ("eagle3", {"draft_vocab": 40, "tensors": {"d2t": LAST - 1}}, ConfigError, ["d2t maps draft id 0 to -1"]),
    (
        "eagle3",
        {"draft_vocab": 40, "tensors": {"d2t": LAST * 0}},
        ConfigError,
        ["d2t and t2d keep different"],
    ),
    (
        "eagle3",
        {"draft_vocab": 40, "tensors": {"d2t": -torch.arange(40)}},
        ConfigError,
        ["two draft ids to one"],
    ),
    (
        "eagle3",
        {"draft_vocab": 40, "tensors": {"d2t": LAST[:30] * 0}},
        ConfigError,
        ["30 draft ids", "40 rows"],
    ),
    (
        "eagle3",
        {"draft_vocab": 40, "drop": ("d2t", "t2d")},
        ConfigError,
        ["draft vocabulary of 40 of 300", "no map"],
    ),
    ("eagle3", {"lm_head": False, "draft_vocab_size": 40}, ConfigError, ["draft vocabulary of 40", "no map"]),
    # layers of the target
    ("eagle3", {"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, Unsupported, ["[2, 4, 9]", "8 layers"]),
    ("eagle3", {"eagle_aux_hidden_state_layer_ids": "2"}, ConfigError, ["list of integers"]),
    ("eagle3", {"fc": False}, ConfigError, ["lacks fc.weight"]),
    (
        "eagle3",
        {"eagle_config": {"use_aux_hidden_state": False}},
        ConfigError,
        ["use_aux_hidden_state=false"],
    ),
    # switches
    ("eagle3", {"norm_before_fc": True}, ConfigError, ["lacks input_norm.weight", "announces"]),
    ("eagle3", {"norm_before_fc": True, "fc_norm": True}, ConfigError, ["exclude each other"]),
    (
        "eagle3",
        {"tensors": {"input_norm.weight": torch.ones(192)}},
        ConfigError,
        ["input_norm.weight", "no eagle3 head"],
    ),
    (
        "eagle-speculators",
        {"layernorms": True},
        ConfigError,
        ["lacks embedding_layernorm.weight", "announces"],
    ),
    ("eagle-speculators", {"fusion_bias": True}, ConfigError, ["lacks fc.bias", "announces"]),
    ("eagle3", {"norm_after_fc": True}, Unsupported, ["norm_after_fc=True", "unknown"]),
    (
        "eagle3",
        {"eagle_config": {"use_mtp_layernorm": True}},
        Unsupported,
        ["eagle_config.use_mtp_layernorm=True"],
    ),
    (
        "eagle3",
        {"eagle_config": {"parallel_draft_step": 4}},
        Unsupported,
        ["eagle_config.parallel_draft_step=4"],
    ),
    ("eagle3-speculators", {"sample_from_anchor": True}, Unsupported, ["sample_from_anchor=True", "unknown"]),
    ("eagle3", {"hidden_act": "relu"}, Unsupported, ["hidden_act 'relu'"]),
    ("eagle3", {"rope_scaling": {"rope_type": "spiral"}}, Unsupported, ["rope_type 'spiral'"]),
    # variants out of scope, by name
    ("eagle3", {"tensors": {"mask_hidden": torch.zeros(1, 192)}}, Unsupported, ["P-EAGLE", "mask_hidden"]),
    (
        "eagle3",
        {"tensors": {"midlayer.self_attn.q_norm.weight": torch.ones(16)}},
        Unsupported,
        ["Eagle3Qwen3"],
    ),
    (
        "eagle3",
        {"tensors": {"midlayer.self_attn.kv_a_proj_with_mqa.weight": torch.ones(4, 4)}},
        Unsupported,
        ["latent"],
    ),
    (
        "eagle3",
        {"tensors": {"midlayer.mlp.experts.0.up_proj.weight": torch.ones(4, 4)}},
        Unsupported,
        ["experts"],
    ),
    (
        "eagle3",
        {"architectures": ["Eagle3DeepseekV2ForCausalLM"]},
        Unsupported,
        ["Eagle3DeepseekV2ForCausalLM"],
    ),
    ("eagle3-speculators", {"speculators_model_type": "peagle"}, Unsupported, ["'peagle'", "P-EAGLE"]),
    (
        "eagle",
        {"tensors": {"layers.0.surprise.weight": torch.ones(2)}},
        ConfigError,
        ["layers.0.surprise.weight"],
    ),
]


@pytest.mark.parametrize(("layout", "options", "error", "told"), FAULTS)
def test_a_fault_of_the_checkpoint_is_named(layout, options, error, told, target, info, tmp_path):
    path = write_head(tmp_path / "head", layout, target, **options)
    with pytest.raises(error) as raised:
        prepare(default_manager(), {"model": str(path), "num_speculative_tokens": 3}, info)
    assert all(text in str(raised.value) for text in [*told, str(path)]), str(raised.value)


def test_faults_come_before_the_targets_weights(target, tmp_path, monkeypatch):
    from specdecode import models

    monkeypatch.setattr(models, "load_model", lambda *_, **__: pytest.fail("the target was loaded"))
    path = write_head(tmp_path / "head", "eagle3", target, draft_vocab=40, tensors={"d2t": LAST})
    with pytest.raises(ConfigError, match="d2t maps draft id 39 to 300"):
        LLM(str(target), device="cpu", speculative_config={"model": str(path), "num_speculative_tokens": 3})


def test_another_tokenizer_is_told_by_its_first_token_that_differs(target, info, tmp_path):
    path = write_head(tmp_path / "head", "eagle3", target)
    tokenizer = json.loads((target / "tokenizer.json").read_text("utf-8"))
    file = path / "tokenizer.json"
    config = {"model": str(path), "num_speculative_tokens": 3}
    file.write_text(json.dumps(tokenizer), "utf-8")
    prepare(default_manager(), config, info)
    vocab = tokenizer["model"]["vocab"]
    first, second = sorted(vocab, key=vocab.get)[70:72]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    file.write_text(json.dumps(tokenizer), "utf-8")
    with pytest.raises(ConfigError, match=f"its token 70 is {second!r}, the target's is {first!r}"):
        prepare(default_manager(), config, info)


def test_the_wrong_method_is_told_the_right_one(target, info, tmp_path):
    path = write_head(tmp_path / "head", "eagle3", target)
    with pytest.raises(ConfigError, match="set method to 'eagle3'"):
        prepare(default_manager(), {"method": "eagle", "model": str(path), "num_speculative_tokens": 3}, info)


def test_an_ordinary_model_is_not_claimed(target, info):
    from specdec_eagle.recognition import kind_of
    from specdecode.plugins.checkpoint import read_checkpoint

    assert kind_of(read_checkpoint(target))[0] is None
    with pytest.raises(ConfigError, match=r"lacks .* tensors of an eagle head \(fc.weight"):
        prepare(
            default_manager(), {"method": "eagle", "model": str(target), "num_speculative_tokens": 3}, info
        )


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"num_speculative_tokens": 0}, "between 1 and 1024"),
        ({"speculative_token_tree": "[(0,), (0, 0"}, "must list for each node"),
        ({"speculative_token_tree": [[0], [1, 0]]}, "without [1]"),
        ({"speculative_token_tree": [[0], [0]]}, "[0] twice"),
        ({"speculative_token_tree": [[0], [0, 0]], "num_speculative_tokens": 3}, "the 2 nodes"),
        ({"speculative_token_tree": [[0]], "tree_top_k": 2}, "exclude each other"),
        ({"num_speculative_tokens": 3, "tree_depth": 2}, "no effect without tree_top_k"),
        ({"num_speculative_tokens": 3, "confidence_threshold": 1.0}, "between 0 and 1"),
        ({"num_speculative_tokens": 3, "tree_top_k": 2, "confidence_threshold": 0.5}, "is for chains"),
        ({"num_speculative_tokens": 3, "quantization": "int8"}, "not quantized"),
        ({"num_speculative_tokens": 3, "draft_tensor_parallel_size": 2}, "must be 1"),
        ({"num_speculative_tokens": 3, "dtype": "float16"}, "must be the target's 'float32'"),
        ({"num_speculative_tokens": 3, "aux_layer": 1}, "aux_layer_ids"),
    ],
)
def test_a_fault_of_the_configuration_is_named(keys, told, target, info, tmp_path):
    path = write_head(tmp_path / "head", "eagle3", target)
    with pytest.raises(ConfigError) as raised:
        prepare(default_manager(), {"method": "eagle3", "model": str(path), **keys}, info)
    assert told in str(raised.value)
