"""A stage for the manual's code blocks: what its paths, names and addresses stand for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

#: Where the manual's servers listen.
SERVED = "http://127.0.0.1:8000"


class Stage:
    """Tiny checkpoints by the last part of a path in the manual, each written when it is first named.

    Heads are told by their checkpoints, as for a user. A name that is none of these is the target's.
    """

    def __init__(self, folder: Path) -> None:
        from specdecode.testing.tiny import tiny_checkpoint
        from specdecode.testing.tiny_vision import tiny_vision_checkpoint

        self._folder = folder
        #: With a tokenizer and chat template, and layers enough for EAGLE-3 to read.
        self.target = tiny_checkpoint(folder / "target", num_hidden_layers=6)
        self._writers: dict[str, Callable[[Path], Path]] = {
            "draft": lambda path: tiny_checkpoint(path, num_hidden_layers=1),
            "smolvlm": tiny_vision_checkpoint,
            "head": lambda path: self._testing("eagle").write_head(path, "eagle", self.target),
            "eagle3": lambda path: self._testing("eagle").write_head(path, "eagle3", self.target),
            "heads": lambda path: self._testing("medusa").write_heads(path, "medusa-1", self.target),
            "medusa-2": lambda path: self._testing("medusa").write_heads(path, "medusa-2", self.target),
            "accelerator": lambda path: self._testing("mlp").write_speculator(path, self.target),
            "MiMo-7B-RL": lambda path: self._testing("mtp").write_target(path, max_position_embeddings=512),
            "adapter": self._adapter,
            "checkpoint": lambda path: self._testing("mtp").write_modules(path, self.target),
        }

    def _adapter(self, path: Path) -> Path:
        from specdecode.testing.adapters import write_adapter

        return write_adapter(path, self.target)

    @staticmethod
    def _testing(distribution: str) -> Any:
        return pytest.importorskip(f"specdec_{distribution}.testing")

    def path(self, name: str) -> str:
        """What ``name`` stands for; a directory that a block made itself stands for itself."""
        known = Path(name).name
        if known in self._writers:
            path = self._folder / known
            return str(path if path.is_dir() else self._writers[known](path))
        return name if Path(name).is_dir() else str(self.target)

    def speculation(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """A ``speculative_config`` with its checkpoints, and those of its proposers, on the stage."""
        staged = dict(config)
        if "model" in staged:
            staged["model"] = self.path(staged["model"])
        if "proposers" in staged:
            staged["proposers"] = [self.speculation(child) for child in staged["proposers"]]
        return staged

    def engine(self, plain: type) -> type:
        """``LLM`` or ``AsyncLLM`` on the stage: small enough for any machine."""

        small = {
            "device": "cpu",
            "dtype": "float32",
            "max_model_len": 512,
            "num_gpu_blocks_override": 512,
            "tokenizer": str(self.target),  # models with drafting layers are written without one
        }

        def start(llm: Any, model: str, *, speculative_config: Any = None, **options: Any) -> None:
            staged = speculative_config and self.speculation(speculative_config)
            path = self.path(model)
            own = {"tokenizer": None} if (Path(path) / "preprocessor_config.json").is_file() else {}
            plain.__init__(llm, path, speculative_config=staged, **small | own | options)

        def update(llm: Any, source: Any, **options: Any) -> Any:
            staged = self.path(source) if isinstance(source, str) else source
            return plain.update_weights(llm, staged, **options)  # type: ignore[attr-defined]

        return type(plain.__name__, (plain,), {"__init__": start, "update_weights": update})


@pytest.fixture(scope="session")
def stage(tmp_path_factory) -> Stage:
    import torch

    torch.set_num_threads(1)
    return Stage(tmp_path_factory.mktemp("stage"))


@pytest.fixture(scope="session")
def server(stage):
    """``specdecode serve`` with a target, as the manual starts it."""
    pytest.importorskip("fastapi")
    from specdecode.testing.serving import ServerProcess

    options = "--device cpu --dtype float32 --max-model-len 512 --spec-method ngram --spec-tokens 5"
    with ServerProcess(stage.target, *options.split()) as process:
        yield process.url


@pytest.fixture
def staged(stage, monkeypatch) -> dict[str, str]:
    """The variables that blocks may use beside what they import."""
    import specdecode

    monkeypatch.setattr("specdecode.plugins.manager._default", None)  # a page may register methods
    for name in ("LLM", "AsyncLLM"):
        monkeypatch.setattr(specdecode, name, stage.engine(getattr(specdecode, name)))
    names = {"model": "path/of/model", "draft": "path/of/draft", "head": "path/of/eagle3"}
    return names | {"adapter": stage.path("path/of/adapter")}


@pytest.fixture
def openai_client(monkeypatch, server) -> None:
    """OpenAI's client, talking to ``server`` where the manual gives the address of its own."""
    openai = pytest.importorskip("openai")

    class Client(openai.OpenAI):
        def __init__(self, *, base_url: str, **options: Any) -> None:
            super().__init__(base_url=base_url.replace(SERVED, server), **options)

    monkeypatch.setattr(openai, "OpenAI", Client)
