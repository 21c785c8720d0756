"""A target whose next token follows from the last, prompts for it, and the command in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from specdecode.testing.tiny import favour, table_checkpoint
from typer.testing import CliRunner

VOCAB = 120
#: Tokens that the target's answers consist of.
RING = 40


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    ring = {token: 50 + (7 * token + 1) % RING for token in range(VOCAB)}
    return table_checkpoint(
        tmp_path_factory.mktemp("train") / "target",
        favour(ring, vocab_size=VOCAB),
        num_hidden_layers=6,
        max_position_embeddings=256,
    )


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JSON lines, a few dozen."""
    file = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    words = ["".join(chr(97 + (i * step) % 26) for step in (1, 3, 7, 11)) for i in range(90)]
    lines = [json.dumps({"prompt": word}) for word in words]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


#: Small enough for a second or two of training.
SMALL = {
    "dtype": "float32",
    "device": "cpu",
    "data-tokens": 1500,
    "answer-tokens": 32,
    "prompt-tokens": 64,
    "held-out": 8,
    "batch-size": 16,
    "row-tokens": 96,
    "batch-rows": 6,
    "steps": 80,
    "evaluate-every": 40,
    "weights-dtype": "float32",
    "gate-prompts": 2,
    "gate-tokens": 16,
}


@pytest.fixture(scope="session")
def shared_work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts and states of the target that runs with the same data options share."""
    return tmp_path_factory.mktemp("work")


@pytest.fixture
def train(
    target: Path, prompts: Path, shared_work: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Run ``specdecode train METHOD --json``: its exit code, what it printed, and the object if it is one."""
    from specdecode.cli.app import app

    monkeypatch.setenv("COLUMNS", "200")

    def run(method: str, out: Path, *flags: str, **options: Any) -> Any:
        given = {"model": target, "data": prompts, "out": out, "work": shared_work, **SMALL}
        given |= {name.replace("_", "-"): value for name, value in options.items()}
        words = [
            word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))
        ]
        result = CliRunner().invoke(app, ["train", method, *words, "--no-conform", "--json", *flags])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        told = json.loads(result.stdout) if result.stdout.startswith("{") else None
        return SimpleNamespace(code=result.exit_code, stdout=result.stdout, stderr=result.stderr, told=told)

    return run
