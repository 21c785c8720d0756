"""A tiny SmolVLM, and engines on it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL")


@pytest.fixture(scope="session")
def smolvlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from specdecode.testing.tiny_vision import tiny_vision_checkpoint

    torch.set_num_threads(1)
    return tiny_vision_checkpoint(tmp_path_factory.mktemp("smolvlm") / "tiny")


@pytest.fixture(scope="session")
def draft(smolvlm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's text model alone: what a draft model that sees no images is at its best."""
    from specdecode.testing.tiny import tiny_checkpoint

    path = tiny_checkpoint(tmp_path_factory.mktemp("draft") / "tiny")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(smolvlm / name, path / name)
    return path


@pytest.fixture(scope="module")
def engine(smolvlm: Path) -> Iterator[Callable[..., Any]]:
    """``LLM`` on the tiny SmolVLM with changed arguments, one for each set; what it leaves is looked at."""
    from specdecode import LLM

    made: dict[str, LLM] = {}

    def make(**changes: Any) -> LLM:
        key = repr(sorted(changes.items()))
        if key not in made:
            made[key] = LLM(
                str(smolvlm), **({"dtype": "float32", "device": "cpu", "block_size": 8} | changes)
            )
        return made[key]

    yield make
    for llm in made.values():
        assert not llm.llm_engine.core.scheduler.has_unfinished
        llm.llm_engine.core.scheduler.pool.check([])
        llm.shutdown()
