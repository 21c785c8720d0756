"""The benchmarks behind the README measure what the plugin does."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from specdec_suffix.drafting import Draft, Limits


def load(name):
    path = Path(__file__).parents[1] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"suffix_{name}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_replay_counts_steps_and_tokens_and_remembers():
    replay = load("replay")
    text = {"task": "t", "prompt": [1, 2, 3, 4], "output": [9, 1, 2, 3, 4, 5, 6, 7]}
    limits = Limits(most=9, factor=1.0, min_prob=0.1)
    (alone,) = replay.replay_suffix([text], 12, limits, keep=True).values()
    # 1; 2, drafted behind one matching token, and 3; 4, drafted behind three, and 5; 6; 7.
    assert (alone.tokens, alone.accepted) == (7, 2)
    twice = replay.replay_suffix([text, text], 12, limits, keep=True)["t"]
    forgetful = replay.replay_suffix([text, text], 12, limits, keep=False)["t"]
    assert twice.tokens == forgetful.tokens == 14 and forgetful.steps == 2 * alone.steps > twice.steps


def test_a_step_walks_a_tree_and_leaves_the_last_token_to_the_target():
    tally = load("replay").Tally()
    tree = Draft([1, 2, 3, 4], [-1, -1, 1, 2], [0.6, 0.4, 0.4, 0.4], 1.8, 2)
    assert tally.step(tree, [2, 3, 7, 8]) == 3
    assert tally.step(tree, [2, 3]) == 2
    assert (tally.tokens, tally.steps, tally.drafted, tally.accepted) == (5, 2, 8, 3)
    assert tally.by_match[2][:2] == [2, 0]  # its likeliest first token never came


@pytest.mark.parametrize("backend", ["python", "arctic"])
def test_the_cost_benchmark_runs(monkeypatch, capsys, backend):
    if backend == "arctic":
        pytest.importorskip("arctic_inference", reason="arctic-inference is not installed")
    monkeypatch.setattr(
        sys, "argv", ["cost", "--requests", "10", "--backend", backend, "--max-cached-tokens", "600"]
    )
    load("cost").main()
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [int(row[0]) for row in rows[2:]] == list(range(1, 11))
    assert int(rows[-1][7]) <= 600 and int(rows[-1][8]) > 0
