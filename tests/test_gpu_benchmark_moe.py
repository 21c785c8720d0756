"""The benchmark of a mixture of experts on a tiny shape on the CPU: what is measured, not how fast it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks" / "gpu"
TINY = {
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def test_every_part_has_its_rows(tmp_path):
    config = json.loads((FOLDER / "qwen3-30b-a3b-shape" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | TINY))
    command = [
        sys.executable, FOLDER / "moe.py", "--shape", tmp_path, "--layers", "2", "--device", "cpu",
        "--dtype", "float32", "--batches", "1,2", "--context", "40", "--new-tokens", "24", "--repeats", "1",
        "--json", tmp_path / "moe.json",
    ]  # fmt: skip
    env = {name: value for name, value in os.environ.items() if name != "SPECDECODE_CHECK_WRITES"}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=200, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    sections = json.loads((tmp_path / "moe.json").read_text())["sections"]
    assert {(row["batch"], row["tokens"]) for row in sections["steps"]} == {
        (batch, tokens) for batch in (1, 2) for tokens in (1, 2, 4, 6, 8)
    }
    for row in sections["steps"]:
        assert row["experts"] == pytest.approx(row["expected"], rel=0.5)
        assert row["of_floor"] > 1
    first, *_, last = sections["steps"][:5]
    assert first["experts"] == 2 and last["read_gb"] > first["read_gb"]  # more tokens read more experts
    assert [row["batch"] for row in sections["plain"]] == [1, 2]
    assert all(row["of_floor"] > 1 for row in sections["plain"])
    assert all(1 < row["tokens_per_step"] <= 4 for row in sections["synthetic"])
    assert "SYNTHETIC acceptance 0.8" in done.stdout
