"""The benchmark of draft lengths on a tiny shape on the CPU: what is measured, not how fast it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks" / "gpu"
TINY = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 320, "max_position_embeddings": 2048,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HEAD = {
    "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 100,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
}  # fmt: skip


def test_fixed_and_chosen_lengths_side_by_side(tmp_path):
    config = json.loads((FOLDER / "llama-8b-shape" / "config.json").read_text()) | TINY
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "eagle3").mkdir()
    (tmp_path / "eagle3" / "config.json").write_text(json.dumps(config | HEAD))
    command = [
        sys.executable, FOLDER / "run.py", "--shape", tmp_path, "--eagle3", tmp_path / "eagle3",
        "--device", "cpu", "--dtype", "float32", "--batches", "2", "--new-tokens", "12",
        "--sections", "adaptive", "--option", "async_scheduling=true", "--json", tmp_path / "result.json",
    ]  # fmt: skip
    env = {name: value for name, value in os.environ.items() if name != "SPECDECODE_CHECK_WRITES"}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=400, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "result.json").read_text())["sections"]["adaptive"]
    assert [(row["batch"], row["acceptance"]) for row in rows] == [(2, 0.3), (2, 0.6), (2, 0.8)]
    for row in rows:
        fixed = {name: row[name] for name in ("plain", "k=1", "k=2", "k=3", "k=5", "k=7")}
        assert row["best"] == max(fixed, key=fixed.get) and fixed["plain"] == 1
        assert row["to_best"] * fixed[row["best"]] == pytest.approx(row["adaptive"])
        chosen, choices = sum(row["lengths"].values()), sum(row["reasons"].values())
        assert 0 < choices <= chosen <= 2 * choices  # the last one steps alone
    assert "speed over plain, fixed and adaptive" in done.stdout
