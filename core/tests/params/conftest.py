"""Tiny engines with and without speculation, and what they are asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from specdecode import LLM
from specdecode.testing import scripted
from specdecode.testing.tiny import tiny_checkpoint

#: Ways to run an engine, beside its ``speculative_config``.
ENGINES: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunked": {"max_num_batched_tokens": 16},
    "preempted": {"num_gpu_blocks_override": 32},
    "late": {"async_scheduling": True},
}

Start = Callable[..., LLM]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bytes as tokens (id = byte + 3); the next token mostly follows from the last."""
    torch.set_num_threads(1)
    return tiny_checkpoint(tmp_path_factory.mktemp("params"), output_scale=0.3)


@pytest.fixture
def start(checkpoint: Path) -> Iterator[Start]:
    """Makes engines. At the end of the test nothing is left in them."""
    scripted.install()
    engines: list[LLM] = []

    def start(speculation: str | None = None, engine: str = "whole", **keywords: Any) -> LLM:
        config = None
        if speculation is not None:
            config = {"method": speculation, "num_speculative_tokens": 4, **keywords.pop("speculative", {})}
        defaults = {
            "model": str(checkpoint),
            "dtype": "float32",
            "block_size": 4,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "max_model_len": 128,
            "num_gpu_blocks_override": 300,
        }
        llm = LLM(**defaults | ENGINES[engine] | keywords, speculative_config=config)
        engines.append(llm)
        return llm

    yield start
    for llm in engines:
        while llm.llm_engine.has_unfinished_requests():  # in the late order, what nobody waits for
            llm.llm_engine.step()
        core = llm.llm_engine.core
        assert not core.outputs and not core.scheduler.running and not core.scheduler.waiting
        core.scheduler.pool.check([])
        assert {m.name: m.value for m in llm.get_metrics()}.get("specdecode:proposer_failures", 0) == 0
        llm.shutdown()
