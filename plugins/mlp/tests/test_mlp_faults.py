"""Faults of a checkpoint: each named, and before any weight of the target is loaded."""

from __future__ import annotations

import json

import pytest
import torch
from specdec_mlp.testing import write_speculator
from specdecode import LLM
from specdecode.contract import ConfigError, Unsupported
from specdecode.plugins import default_manager, prepare

P = "speculator."
FAULTS = [
    ({"drop": (f"{P}proj.2.weight",)}, ConfigError, ["lacks 1 tensors", "speculator.proj.2.weight"]),
    ({"drop": (f"{P}ln.0.bias", f"{P}head.3.weight")}, ConfigError, ["lacks 2", "speculator.head.3.weight"]),
    ({"tied": True, "drop": (f"{P}proj.1.weight",)}, ConfigError, ["proj.1.weight", "with tied weights"]),
    ({"form": "bin", "drop": (f"{P}proj.2.weight",)}, ConfigError, ["speculator.proj.2.weight"]),
    ({"tied": True, "tie_weights": False}, ConfigError, ["emb.1.weight", "untied", "tie_weights"]),
    # sizes
    ({"hidden_size": 48}, ConfigError, ["hidden size 48", "this one has 64"]),
    ({"emb_dim": 128}, ConfigError, ["hidden size 128", "this one has 64"]),
    ({"inner_dim": 48}, ConfigError, ["inner_dim=48", "proj.0.weight has 32 rows"]),
    ({"vocab": 900}, ConfigError, ["another vocabulary", "900 rows", "300 tokens"]),
    (
        {"tensors": {f"{P}head.1.weight": torch.zeros(290, 32)}},
        ConfigError,
        ["head.1.weight has shape [290, 32]", "[300, 32]"],
    ),
    ({"tensors": {f"{P}ln.2.weight": torch.ones(3)}}, ConfigError, ["ln.2.weight has shape [3]"]),
    # the config
    ({"n_predict": 4, "top_k_tokens_per_head": [5, 4]}, ConfigError, ["top_k_tokens_per_head", "[5, 4]"]),
    ({"tie_weights": "yes"}, ConfigError, ["tie_weights must be true or false", "'yes'"]),
    ({"scale_input": 1}, ConfigError, ["scale_input must be true or false"]),
    # variants out of scope, by name
    ({"method": "sum_lstm"}, Unsupported, ["method='sum_lstm'", "only the MLP"]),
    ({"tensors": {f"{P}forget_emb.0.weight": torch.ones(2)}}, Unsupported, ["LSTM", "forget_emb"]),
    ({"tensors": {f"{P}qhead.0.weight": torch.ones(2)}}, Unsupported, ["quantized weights"]),
    ({"tensors": {f"{P}surprise.weight": torch.ones(2)}}, ConfigError, ["surprise.weight"]),
]


@pytest.mark.parametrize(("options", "error", "told"), FAULTS)
def test_a_fault_of_the_checkpoint_is_named(options, error, told, target, info, tmp_path):
    method = options.get("method")
    path = write_speculator(tmp_path / "s", target, fit=False, **options)
    with pytest.raises(error) as raised:
        prepare(default_manager(), {"method": "mlp_speculator", "model": str(path)}, info)
    assert all(text in str(raised.value) for text in [*told, str(path)]), str(raised.value)
    assert method is None or method in str(raised.value)


@pytest.mark.parametrize("n_predict", [0, 3, "4", True])
def test_a_wrong_n_predict(n_predict, target, info, tmp_path):
    path = write_speculator(tmp_path / "s", target, fit=False)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"n_predict": n_predict}))
    told = "n_predict=3, and it holds 4 steps" if n_predict == 3 else "n_predict must be an integer of at"
    with pytest.raises(ConfigError, match=told):
        prepare(default_manager(), {"method": "mlp_speculator", "model": str(path)}, info)


def test_faults_come_before_the_targets_weights(target, tmp_path, monkeypatch):
    from specdecode import models

    monkeypatch.setattr(models, "load_model", lambda *_, **__: pytest.fail("the target was loaded"))
    path = write_speculator(tmp_path / "s", target, fit=False, drop=(f"{P}ln.0.bias",))
    with pytest.raises(ConfigError, match=r"ln\.0\.bias"):
        LLM(str(target), device="cpu", speculative_config={"model": str(path)})


def test_another_tokenizer_is_told_by_its_first_token_that_differs(target, info, tmp_path):
    path = write_speculator(tmp_path / "s", target, fit=False)
    tokenizer = json.loads((target / "tokenizer.json").read_text("utf-8"))
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
        ({"num_speculative_tokens": 5}, "num_speculative_tokens is 5"),
        ({"num_speculative_tokens": 5}, "n_predict=4"),
        (
            {"speculative_token_tree": [[0] * n for n in range(1, 6)]},
            "speculative_token_tree has the depth 5",
        ),
        ({"speculative_token_tree": "[(0,), (0, 0"}, "must list for each node"),
        ({"speculative_token_tree": [[0], [0, 0]], "num_speculative_tokens": 3}, "the 2 nodes"),
        ({"speculative_token_tree": [[0]], "tree_top_k": 2}, "exclude each other"),
        ({"quantization": "int8"}, "not quantized"),
        ({"draft_tensor_parallel_size": 2}, "must be 1"),
        ({"dtype": "float16"}, "must be the target's 'float32'"),
        ({"tree_depth": 2}, "is not a known key"),
    ],
)
def test_a_fault_of_the_configuration_is_named(keys, told, target, info, tmp_path):
    path = write_speculator(tmp_path / "s", target, fit=False)
    with pytest.raises(ConfigError) as raised:
        prepare(default_manager(), {"method": "mlp_speculator", "model": str(path), **keys}, info)
    assert told in str(raised.value)
