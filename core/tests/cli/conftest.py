"""The command in this process, and a model small enough to run it on."""

import pytest
import torch
from typer.testing import CliRunner


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A checkpoint whose next token follows from the last one, so that its outputs run in circles."""
    from specdecode.testing.tiny import tiny_checkpoint

    torch.set_num_threads(1)
    return str(tiny_checkpoint(tmp_path_factory.mktemp("tiny"), zero_outputs=True))


@pytest.fixture
def invoke(monkeypatch):
    """Run ``specdecode`` with these arguments."""
    from specdecode.cli.app import app

    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    return lambda *arguments, **options: CliRunner().invoke(app, list(arguments), **options)
