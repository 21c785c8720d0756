"""The GPU benchmark's script on a tiny shape on the CPU: what is measured, not how fast it is."""

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
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 2048,
}
HEAD = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": 100,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
}
DRAFT = {"hidden_size": 32, "num_hidden_layers": 1, "tie_word_embeddings": True}
VLLM_PLAIN = {
    "vllm": "0.26.0",
    "card": "X",
    "config": None,
    "rows": {"2": {"ms_per_token": 1e4, "ms_per_step": 1e4, "tokens_per_step": 1.0}},
}


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The JSON of one run, and what it printed."""
    root = tmp_path_factory.mktemp("gpu-benchmarks")
    config = json.loads((FOLDER / "llama-8b-shape" / "config.json").read_text()) | TINY
    (root / "config.json").write_text(json.dumps(config))
    for name, own in (("eagle3", HEAD), ("draft", DRAFT)):
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config | own))
    (root / "plain.json").write_text(json.dumps(VLLM_PLAIN))
    command = [
        sys.executable, FOLDER / "run.py", "--shape", root, "--device", "cpu", "--dtype", "float32",
        "--batches", "1,2", "--context", "40", "--new-tokens", "48", "--repeats", "2",
        "--eagle3", root / "eagle3", "--draft", root / "draft",
        "--sections", "hardware,plain,steps,ngram,synthetic,heads,vllm", "--trace-dir", root / "traces",
        "--option", "async_scheduling=true", "--vllm", root / "plain.json", root / "missing.json",
        "--json", root / "result.json",
    ]  # fmt: skip
    # The steps alone write into blocks that no request holds, which the tests' check would refuse.
    env = {name: value for name, value in os.environ.items() if name != "SPECDECODE_CHECK_WRITES"}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=400, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((root / "result.json").read_text())["sections"], done.stdout


def test_every_section_has_its_rows_and_its_table(report):
    sections, printed = report
    assert {(row["batch"], row["tokens"]) for row in sections["steps"]} == {
        (batch, tokens) for batch in (1, 2) for tokens in (1, 2, 4, 6, 8, 16, 32, 64)
    }
    for name, methods in (("plain", 1), ("ngram", 2), ("synthetic", 4), ("heads", 2)):
        rows = sections[name]
        assert [row["batch"] for row in rows] == [1, 2] * methods
        assert all(row["ms_per_token"] > 0 < row["ms_per_step"] for row in rows)
    assert all(row["of_floor"] > 1 for row in sections["plain"])
    titles = (
        "Plain decoding",
        "The target's step alone",
        "SYNTHETIC acceptance 0.8",
        "vLLM's own run",
        "Goals",
    )
    assert all(title in printed for title in titles)
    assert [row["method"] for row in sections["profile"]] == [
        name
        for name in ("plain", "ngram", "eagle-synthetic", "eagle3-synthetic", "draft_model-synthetic")
        for _ in range(2)
    ]


def test_the_looping_text_is_drafted_and_accepted(report):
    """47 decode tokens: a step without drafts or so, then as many a step as are drafted, and one."""
    sections, _ = report
    for row, plain in zip(sections["ngram"], 2 * sections["plain"], strict=True):
        drafted = int(row["method"].removeprefix("ngram k="))
        assert row["tokens_per_step"] > 0.75 * (drafted + 1) and plain["tokens_per_step"] == 1
        assert row["speedup"] == pytest.approx(plain["ms_per_token"] / row["ms_per_token"])
        assert row["efficiency"] == pytest.approx(row["speedup"] / row["tokens_per_step"])


def test_synthetic_acceptance_is_near_what_was_asked_for(report):
    sections, _ = report
    for row in sections["synthetic"]:
        assert row["tokens_per_step"] == pytest.approx(row["expected_tokens"], rel=0.4)
    (low, _, high, *_) = (row["tokens_per_step"] for row in sections["synthetic"])
    assert low < high


def test_vllm_is_put_beside_rows_of_the_same_batch(report):
    sections, _ = report
    plain, missing = sections["vllm"]
    ours = next(row for row in sections["plain"] if row["batch"] == 2)
    assert plain["ratio"] == pytest.approx(1e4 / ours["ms_per_token"]) and plain["card"] == "X"
    assert missing == {"run": "missing.json is missing"}


@pytest.mark.sweep  # half a minute, of starting processes
def test_parallel_ranks_have_their_rows(tmp_path):
    config = json.loads((FOLDER / "llama-8b-shape" / "config.json").read_text()) | TINY
    shapes = {}
    for name, own in (("target", {}), ("eagle3", HEAD), ("draft", DRAFT)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config | own))
    shapes["8b"] = [*(str(tmp_path / name) for name in ("target", "eagle3", "draft")), 1e6]
    command = [
        sys.executable, FOLDER / "parallel.py", "--device", "cpu", "--dtype", "float32", "--sizes", "1,2",
        "--shapes", "8b", "--folders", json.dumps(shapes), "--batches", "1", "--context", "40",
        "--new-tokens", "24", "--repeats", "2", "--json", tmp_path / "result.json",
        "--methods", "plain,draft shared out",
    ]  # fmt: skip
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    sections = json.loads((tmp_path / "result.json").read_text())["sections"]
    assert all(row["bugs"] == 0 and row["equal"] >= 7 for row in sections["equality"])
    assert len(sections["equality"]) == 9
    rows = [(row["ranks"], row["method"]) for row in sections["times"]]
    assert rows == [(1, "plain"), (2, "plain"), (2, "draft shared out")]
    assert all(row["ms_per_token"] > 0 < row["floor_ms"] for row in sections["times"])


def test_ways_to_sum_over_ranks():
    """Without GPUs there is no memory that ranks share: the other ways have their figures."""
    command = [sys.executable, str(FOLDER / "sums.py"), "--device", "cpu", "--tokens", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    titles, _, row = done.stdout.strip().splitlines()[1:]
    assert titles.split() == ["tokens", "solo", "nccl"]
    assert all(float(figure) > 0 for figure in row.split())


def test_quantised_formats_beside_their_floors(tmp_path):
    config = json.loads((FOLDER / "llama-8b-shape" / "config.json").read_text()) | TINY
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": 128, "head_dim": 32}))
    command = [
        sys.executable, FOLDER / "quantised.py", "--shape", tmp_path, "--device", "cpu", "--batches", "1",
        "--context", "20", "--new-tokens", "12", "--repeats", "1", "--formats", "fp8,int4,bf16",
        "--json", tmp_path / "result.json",
    ]  # fmt: skip
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert [row["method"] for row in rows] == ["fp8", "int4", "bf16"]
    assert all(row["of_floor"] > 1 for row in rows)
    fp8, int4, plain = (row["gib"] for row in rows)
    assert int4 < fp8 < plain and "int4 weights" in done.stdout


def test_goals_are_compared_as_they_are_stated(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import goals

    rows = goals.compare(
        {
            "plain": [{"method": "plain", "batch": 1, "ms_per_token": 5.6, "idle": 0.01}],
            "steps": [{"batch": 8, "tokens": 6, "step_ms": 6.4, "deciding": 0.04}],
            "ngram": [{"method": "ngram k=5", "batch": 32, "efficiency": 0.8, "idle": 0.5}],
            "vllm": [{"run": "ngram k=5", "batch": 1, "ratio": 1.39}],
        }
    )
    assert [(row["goal"], row["batch"], row["bound"], row["met"]) for row in rows] == [
        ("plain, ms a token", 1, "<= 5.5", "NO"),
        ("step of 6 tokens a row, ms", 8, "<= 6.4", "yes"),
        ("its deciding and sampling, share", 8, "<= 0.03", "NO"),
        ("ngram k=5, efficiency", 32, ">= 0.8", "yes"),
        ("plain, idle", 1, "<= 0.03", "yes"),
        ("ngram, tokens/s to vLLM", 1, ">= 1.4", "NO"),
    ]


def test_adapters(tmp_path):
    """What adapters cost, and that they leave alone who has none."""
    config = json.loads((FOLDER / "llama-8b-shape" / "config.json").read_text()) | TINY
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [
        sys.executable, FOLDER / "lora.py", "--shape", tmp_path, "--device", "cpu", "--dtype", "float32",
        "--context", "12", "--new-tokens", "6", "--repeats", "1", "--batches", "1,8",
        "--json", tmp_path / "result.json",
    ]  # fmt: skip
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    sections = json.loads((tmp_path / "result.json").read_text())["sections"]
    assert [(row["equal"], row["of"]) for row in sections["checks"]] == [(4, 4)] * 3
    told = [(row["what"], row["batch"]) for row in sections["engines"]]
    assert ("one adapter", 1) in told and ("an adapter a row", 8) in told and len(told) == 7
    assert {row["adapters"] for row in sections["kernels"]} == {1, 8}
