"""Targets that drafters are written for."""

from __future__ import annotations

import pytest
import torch
from specdecode import LLM
from specdecode.models import load_model, resolve_model
from specdecode.testing.tiny import tiny_checkpoint

MAX_MODEL_LEN = 96


@pytest.fixture(scope="session")
def target(tmp_path_factory):
    """Its next token follows from the last."""
    path = tmp_path_factory.mktemp("medusa") / "target"
    return tiny_checkpoint(path, output_scale=0.2, num_hidden_layers=2, max_position_embeddings=256)


@pytest.fixture(scope="session")
def model(target):
    return load_model(
        resolve_model(str(target)),
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_model_len=MAX_MODEL_LEN,
    )


@pytest.fixture(scope="session")
def info(target):
    with LLM(
        str(target),
        dtype="float32",
        device="cpu",
        max_model_len=MAX_MODEL_LEN,
        num_gpu_blocks_override=16,
        skip_tokenizer_init=True,
    ) as llm:
        return llm.llm_engine.target
