"""The prompts and conversations that heads are judged on, and the benchmark that does it, on a tiny model."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path

import pytest
from specdecode.bench.datasets import read_dataset

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "benchmarks/data"


def script(path: Path):
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def entries():
    return [json.loads(line) for line in (DATA / "held_out.jsonl").read_text("utf-8").splitlines()]


def test_they_are_real_prompts_of_four_tasks_with_named_licences():
    tasks = read_dataset(DATA / "held_out.jsonl", "jsonl")
    assert {task.name for task in tasks} == {"chat", "edit-code", "document", "maths"}
    assert sum(len(task.prompts) for task in tasks) >= 40
    found = entries()
    assert len({entry["prompt"] for entry in found}) == len({entry["id"] for entry in found}) == len(found)
    assert all(100 <= len(entry["prompt"]) <= 2500 for entry in found)
    licences = (DATA / "LICENCES.md").read_text("utf-8")
    counted = Counter((entry["task"], entry["source"].rsplit(", ", 1)[1]) for entry in found)
    for (task, licence), count in counted.items():
        row = next(line for line in licences.splitlines() if line.startswith(f"| {task} |"))
        assert f"| {count} |" in row and row.endswith(f"| {licence} |")


def test_the_conversations_are_those_of_their_script_and_do_not_loop():
    made = script(DATA / "make_conversations.py")
    asked = {(task, first): tuple(turns) for task, own in made.CONVERSATIONS.items() for first, turns in own}
    found = [json.loads(line) for line in (DATA / "conversations.jsonl").read_text("utf-8").splitlines()]
    assert {entry["task"] for entry in found} == set(made.CONVERSATIONS)
    for entry in found:
        users, answers = (
            [message["content"] for message in entry["messages"] if message["role"] == role]
            for role in ("user", "assistant")
        )
        assert asked[entry["task"], users[0]] == tuple(users[1:]) and len(answers) == len(users) == 6
        assert max(map(made.repeated, answers)) <= made.LOOPS
    tasks = read_dataset(DATA / "conversations.jsonl", "messages")
    assert sum(len(task.prompts) for task in tasks) == 6 * len(found)
    assert [len(prompt.before) for prompt in tasks[0].prompts[:6]] == [0, 2, 4, 6, 8, 10]


def test_the_benchmark_prints_a_table_and_passes_over_heads_that_are_not_there(tmp_path, monkeypatch, capsys):
    from specdecode.testing.tiny import tiny_checkpoint

    model = tiny_checkpoint(tmp_path / "m", zero_outputs=True, max_position_embeddings=4096)
    lookup = {"method": "ngram", "num_speculative_tokens": 3}
    configs = {
        "0": {"lookup": lookup, "absent": {"head": "nowhere"}},
        "1": {"standard": {**lookup, "rejection_sample_method": "standard"}, "wrong": {"method": "no_such"}},
    }
    (tmp_path / "configs.json").write_text(json.dumps(configs))
    options = {
        "model": model, "configs": tmp_path / "configs.json", "heads": tmp_path, "dtype": "float32",
        "device": "cpu", "each": 1, "max-tokens": 48, "json": tmp_path / "out.json",
    }  # fmt: skip
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    monkeypatch.setattr(sys, "argv", ["heads.py", *words])
    with pytest.raises(SystemExit, match="failed: wrong"):
        script(ROOT / "benchmarks/heads.py").main()
    printed = capsys.readouterr()
    assert "absent is passed over" in printed.err and "no_such" in printed.err
    assert "not promised" in printed.out and "accept edit-code" in printed.out
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    good = [row for row in rows if "error" not in row]
    assert Counter(row["name"] for row in good) == {"lookup": 5, "standard": 5}
    assert all(row["identical"] for row in good if row["name"] == "lookup")
    total = next(row for row in good if row["name"] == "lookup" and row["task"] == "all")
    assert total["acceptance_length"] > 1 and len(total["acceptance_per_position"]) == 3
    assert total["speedup"] == pytest.approx(total["tokens_per_s"] / total["plain_tokens_per_s"])


def test_methods_are_run_side_by_side_over_conversations(tmp_path, monkeypatch, capsys):
    from specdecode.testing.tiny import tiny_checkpoint

    model = tiny_checkpoint(tmp_path / "m", zero_outputs=True, max_position_embeddings=4096)
    configs = {
        "0": {"lookup": {"method": "ngram", "num_speculative_tokens": 3}, "absent": {"head": "nowhere"}}
    }
    (tmp_path / "configs.json").write_text(json.dumps(configs))
    options = {
        "model": model, "configs": tmp_path / "configs.json", "heads": tmp_path, "dtype": "float32",
        "turns": 2, "max-tokens": 24, "json": tmp_path / "out.json",
    }  # fmt: skip
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    monkeypatch.setattr(sys, "argv", ["conversations.py", *words])
    # Its neighbour, which it finds as a script; to pytest that name is the folder's.
    monkeypatch.setitem(sys.modules, "heads", script(ROOT / "benchmarks/heads.py"))
    script(ROOT / "benchmarks/conversations.py").main()
    assert "lookup" in capsys.readouterr().out
    rows = {
        (row["method"], row["task"]): row for row in json.loads((tmp_path / "out.json").read_text())["rows"]
    }
    assert set(rows) == {(method, task) for method in ("plain", "lookup") for task in ("edit-code", "all")}
    assert rows["plain", "all"]["speedup"] == 1 and rows["plain", "all"]["tokens_per_target_step"] == 1
    assert rows["lookup", "all"]["tokens_per_target_step"] > 1 and not rows["lookup", "all"]["different"]
