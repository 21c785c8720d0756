"""A target with three layers of its own."""

from __future__ import annotations

import pytest
import torch
from specdec_mtp.testing import write_target
from specdecode.models import describe_target, resolve_model


@pytest.fixture(scope="session")
def target(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("mtp") / "target", modules=3)


@pytest.fixture(scope="session")
def info(target):
    """What methods are told of it."""
    kind = {"dtype": torch.float32, "device": torch.device("cpu"), "max_model_len": 96}
    return describe_target(resolve_model(str(target)), **kind)
