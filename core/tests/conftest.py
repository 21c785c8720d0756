"""Fixtures that several folders of core's tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# The engine then asserts that no write reaches a block that is published or held twice.
os.environ.setdefault("SPECDECODE_CHECK_WRITES", "1")


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose next token follows from the last one now and then, as untrained heads guess."""
    import torch
    from specdecode.testing.tiny import tiny_checkpoint

    torch.set_num_threads(1)
    return tiny_checkpoint(
        tmp_path_factory.mktemp("tiny") / "target", output_scale=0.5, max_position_embeddings=256
    )
