"""Engines around tiny checkpoints, and what they draft; everything on one thread and one device."""

from __future__ import annotations

import json
import os
import shutil
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("SPECDECODE_CHECK_WRITES", "1")

Ask = tuple[Sequence[int], Any]


@pytest.fixture(autouse=True)
def nothing_fails(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What the engine would survive, drafts being dropped, is a fault of the plugin here."""
    yield
    failed = [r for when in ("setup", "call") for r in caplog.get_records(when) if r.name.endswith(".guard")]
    assert not failed, [record.getMessage() for record in failed]


@pytest.fixture(scope="session")
def kit() -> Any:
    """The functions of this file."""
    return types.SimpleNamespace(
        ask=ask, generate=generate, ids=ids, metric=metric, edit=edit, retensor=retensor
    )


def ask(prompt: Sequence[int], **params: Any) -> Ask:
    from specdecode import SamplingParams

    return list(prompt), SamplingParams(**({"ignore_eos": True} | params))


def generate(llm: Any, asks: Sequence[Ask]) -> list[Any]:
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in asks]
    return llm.generate(prompts, [params for _, params in asks], use_tqdm=False)


def ids(outputs: Sequence[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def metric(llm: Any, name: str) -> float:
    return {metric.name: metric.value for metric in llm.get_metrics()}.get(name, 0)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from specdecode.testing.tiny import tiny_checkpoint

    torch.set_num_threads(1)
    return tiny_checkpoint(
        tmp_path_factory.mktemp("models") / "target", output_scale=0.5, max_position_embeddings=512
    )


@pytest.fixture(scope="session")
def draft(target: Path) -> Path:
    """The target with noise on its weights, right about every other time."""
    import torch

    folder = Path(shutil.copytree(target, target.parent / "draft"))
    generator = torch.Generator().manual_seed(1)

    def shake(tensors: dict[str, Any]) -> None:
        for name in tensors:
            tensor = tensors[name]
            tensors[name] = tensor + 0.15 * tensor.std() * torch.randn(tensor.shape, generator=generator)

    retensor(folder, shake)
    return folder


@pytest.fixture
def llm_of() -> Iterator[Callable[..., Any]]:
    """``llm_of(target, draft, k, **engine)``: an engine, shut down at the end; no draft: plain.

    ``spec`` are further keys of ``speculative_config``.
    """
    from specdecode import LLM

    made: list[Any] = []

    def make(target: Path, draft: Path | None = None, k: int = 4, spec: Any = None, **engine: Any) -> Any:
        config = None
        if draft is not None:
            config = {
                "method": "draft_model",
                "model": str(draft),
                "num_speculative_tokens": k,
                **(spec or {}),
            }
        defaults = {
            "dtype": "float32",
            "device": "cpu",
            "block_size": 4,
            "max_num_seqs": 8,
            "num_gpu_blocks_override": 600,
            "max_model_len": 256,
            "skip_tokenizer_init": True,
        }
        made.append(LLM(str(target), speculative_config=config, **(defaults | engine)))
        return made[-1]

    yield make
    for llm in made:
        llm.shutdown()


def edit(folder: Path, **changes: Any) -> None:
    """Change keys of a checkpoint's config.json; None removes one."""
    file = folder / "config.json"
    config = json.loads(file.read_text("utf-8")) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}), "utf-8")


def retensor(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a checkpoint's tensors in place."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
