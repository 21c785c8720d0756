"""Targets that drafters are written for."""

from __future__ import annotations

import pytest
from specdecode.testing.tiny import loaded, tiny_checkpoint


@pytest.fixture(scope="session")
def target(tmp_path_factory):
    """Its next token follows from the last."""
    path = tmp_path_factory.mktemp("mlp") / "target"
    return tiny_checkpoint(path, output_scale=0.2, num_hidden_layers=2, max_position_embeddings=256)


@pytest.fixture(scope="session")
def loaded_target(target):
    return loaded(target)


@pytest.fixture(scope="session")
def model(loaded_target):
    return loaded_target[0]


@pytest.fixture(scope="session")
def info(loaded_target):
    return loaded_target[1]
