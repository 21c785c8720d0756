"""Faults of a checkpoint: each named, and before any weight of the target is loaded."""

from __future__ import annotations

import json

import pytest
import torch
from specdec_medusa.testing import write_heads
from specdecode import LLM
from specdecode.contract import ConfigError, Unsupported
from specdecode.plugins import default_manager, prepare

FAULTS = [
    # layout, options, error, what it says
    ("medusa-1", {"drop": ("1.0.linear.weight",)}, ConfigError, ["lacks 1 tensors", "1.0.linear.weight"]),
    ("medusa-1", {"drop": ("2.0.linear.bias", "3.1.weight")}, ConfigError, ["lacks 2", "2.0.linear.bias"]),
    ("medusa-1", {"layers": 2, "drop": ("0.1.linear.weight",)}, ConfigError, ["0.1.linear.weight"]),
    (
        "medusa-1",
        {"drop": ("1.0.linear.weight",), "form": "pt"},
        ConfigError,
        ["lacks 1 tensors", "1.0.linear.weight"],
    ),
    (
        "vllm",
        {"drop": ("medusa_heads.blocks.1.layers.0.weight",)},
        ConfigError,
        ["medusa_heads.blocks.1.layers.0.weight"],
    ),
    ("vllm", {"drop": ("medusa_heads.lm_heads.3.weight",)}, ConfigError, ["lm_heads.3.weight"]),
    ("medusa-1", {"tensors": {"7.1.weight": torch.zeros(300, 64)}}, ConfigError, ["output layer of head 7"]),
    (
        "medusa-1",
        {"tensors": {"0.3.weight": torch.zeros(300, 64)}},
        ConfigError,
        ["0.1.weight", "0.3.weight"],
    ),
    # shapes
    (
        "medusa-1",
        {"tensors": {"0.0.linear.weight": torch.zeros(48, 48)}},
        ConfigError,
        ["hidden size 48", "this one has 64"],
    ),
    (
        "medusa-1",
        {"tensors": {"1.0.linear.weight": torch.zeros(64, 32)}},
        ConfigError,
        ["1.0.linear.weight has shape [64, 32]", "[64, 64]"],
    ),
    (
        "medusa-1",
        {"tensors": {"1.0.linear.bias": torch.zeros(3)}},
        ConfigError,
        ["1.0.linear.bias has shape [3]"],
    ),
    ("vllm", {"hidden_size": 128}, ConfigError, ["hidden size 128", "this one has 64"]),
    (
        "medusa-1",
        {"tensors": {f"{i}.1.weight": torch.zeros(900, 64) for i in range(4)}},
        ConfigError,
        ["another vocabulary", "900 rows", "300 tokens"],
    ),
    ("medusa-1", {"tensors": {"2.1.weight": torch.zeros(290, 64)}}, ConfigError, ["2.1.weight", "[300, 64]"]),
    # the map
    (
        "vllm",
        {"draft_vocab": 40, "tensors": {"token_map": torch.arange(280, 320)}},
        ConfigError,
        ["token_map maps draft id 20 to 300", "vocabulary of 300"],
    ),
    (
        "vllm",
        {"draft_vocab": 40, "tensors": {"token_map": torch.zeros(40, dtype=torch.int64)}},
        ConfigError,
        ["two draft ids to one"],
    ),
    (
        "vllm",
        {"draft_vocab": 40, "tensors": {"token_map": torch.arange(30)}},
        ConfigError,
        ["keeps 30", "40"],
    ),
    (
        "vllm",
        {"draft_vocab": 40, "drop": ("token_map",)},
        ConfigError,
        ["another vocabulary", "no token_map"],
    ),
    # the config
    ("medusa-1", {"medusa_choices": [[0, 0]]}, ConfigError, ["medusa_choices", "without [0]"]),
    ("medusa-1", {"medusa_choices": "often"}, ConfigError, ["medusa_choices", "must list for each node"]),
    ("vllm", {"logit_scale": "loud"}, ConfigError, ["logit_scale must be a positive number", "'loud'"]),
    # variants out of scope, by name
    ("medusa-1", {"tensors": {"hydra_head.0.weight": torch.zeros(2)}}, Unsupported, ["Hydra", "hydra_head"]),
    (
        "medusa-1",
        {"tensors": {"prefix_layer.self_attn.q_proj.weight": torch.zeros(2)}},
        Unsupported,
        ["Hydra++"],
    ),
    ("medusa-1", {"tensors": {"0.0.linear.qweight": torch.zeros(2)}}, Unsupported, ["quantized weights"]),
    ("medusa-1", {"tensors": {"surprise.weight": torch.zeros(2)}}, ConfigError, ["surprise.weight"]),
]


@pytest.mark.parametrize(("layout", "options", "error", "told"), FAULTS)
def test_a_fault_of_the_checkpoint_is_named(layout, options, error, told, target, info, tmp_path):
    path = write_heads(tmp_path / "heads", layout, target, fit=False, **options)
    with pytest.raises(error) as raised:
        prepare(default_manager(), {"method": "medusa", "model": str(path)}, info)
    assert all(text in str(raised.value) for text in [*told, str(path)]), str(raised.value)


def test_faults_come_before_the_targets_weights(target, tmp_path, monkeypatch):
    from specdecode import models

    monkeypatch.setattr(models, "load_model", lambda *_, **__: pytest.fail("the target was loaded"))
    path = write_heads(tmp_path / "heads", "medusa-1", target, fit=False, drop=("0.0.linear.bias",))
    with pytest.raises(ConfigError, match=r"0\.0\.linear\.bias"):
        LLM(str(target), device="cpu", speculative_config={"model": str(path)})


def test_a_target_without_heads_has_none_to_draft_with(target, info):
    with pytest.raises(ConfigError, match="holds no Medusa heads"):
        prepare(default_manager(), {"method": "medusa"}, info)


def test_a_pickle_that_would_run_something_is_not_opened(target, info, tmp_path):
    class Evil:
        def __reduce__(self):
            return (tmp_path.joinpath("ran").touch, ())

    path = write_heads(tmp_path / "heads", "medusa-1", target, fit=False, form="pt")
    torch.save({"0.0.linear.weight": Evil()}, path / "medusa_lm_head.pt")
    with pytest.raises(ConfigError, match="is no part of a tensor"):
        prepare(default_manager(), {"method": "medusa", "model": str(path)}, info)
    assert not (tmp_path / "ran").exists()
    (path / "medusa_lm_head.pt").write_bytes(b"no zip")
    with pytest.raises(ConfigError, match=r"no pickle of torch 1\.6 or later"):
        prepare(default_manager(), {"method": "medusa", "model": str(path)}, info)


def test_another_tokenizer_is_told_by_its_first_token_that_differs(target, info, tmp_path):
    path = write_heads(tmp_path / "heads", "medusa-1", target, fit=False)
    tokenizer = json.loads((target / "tokenizer.json").read_text("utf-8"))
    (path / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    prepare(default_manager(), {"model": str(path)}, info)
    vocab = tokenizer["model"]["vocab"]
    first, second = sorted(vocab, key=vocab.get)[70:72]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    with pytest.raises(ConfigError, match=f"its token 70 is {second!r}, the target's is {first!r}"):
        prepare(default_manager(), {"model": str(path)}, info)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"num_speculative_tokens": 0}, "between 1 and 1024"),
        ({"num_speculative_tokens": 5}, "has 4 heads, one for each token of a chain"),
        ({"speculative_token_tree": "[(0,), (0, 0"}, "must list for each node"),
        ({"speculative_token_tree": "mc_sim_70b"}, "or it names one of 'chain', 'mc_sim_7b_63'"),
        ({"speculative_token_tree": [[0], [1, 0]]}, "without [1]"),
        ({"speculative_token_tree": [[0], [0, 0]], "num_speculative_tokens": 3}, "the 2 nodes"),
        ({"speculative_token_tree": [[0] * n for n in range(1, 6)]}, "has 5 levels"),
        ({"quantization": "int8"}, "not quantized"),
        ({"draft_tensor_parallel_size": 2}, "must be 1"),
        ({"dtype": "float16"}, "must be the target's 'float32'"),
        ({"tree_top_k": 2}, "is not a known key"),
    ],
)
def test_a_fault_of_the_configuration_is_named(keys, told, target, info, tmp_path):
    path = write_heads(tmp_path / "heads", "medusa-1", target, fit=False)
    with pytest.raises(ConfigError) as raised:
        prepare(default_manager(), {"method": "medusa", "model": str(path), **keys}, info)
    assert told in str(raised.value)
