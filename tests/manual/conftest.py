"""A stage for the manual's code blocks: models that its paths and names stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory) -> dict[str, str]:
    """A target with a tokenizer and chat template, and a draft model of the same."""
    import torch
    from specdecode.testing.tiny import tiny_checkpoint

    torch.set_num_threads(1)
    return {
        name: str(tiny_checkpoint(tmp_path_factory.mktemp(name), num_hidden_layers=layers))
        for name, layers in (("target", 2), ("draft", 1))
    }


@pytest.fixture
def staged(tiny_models, monkeypatch) -> dict[str, Any]:
    """The names that blocks may use beside those they import; any model's name is the tiny target's."""
    import specdecode
    from specdecode import LLM

    class Staged(LLM):
        def __init__(self, model: str, **options: Any) -> None:
            path = model if Path(model).is_dir() else tiny_models["target"]
            speculation = options.get("speculative_config")
            if speculation and "model" in speculation:
                options["speculative_config"] = {**speculation, "model": tiny_models["draft"]}
            options = {"max_model_len": 512, "num_gpu_blocks_override": 512, **options}
            super().__init__(model=path, device="cpu", dtype="float32", **options)

    monkeypatch.setattr(specdecode, "LLM", Staged)
    return {"model": "path/of/model", "draft": "path/of/draft", "tiny_models": tiny_models}
