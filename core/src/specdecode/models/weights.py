"""Reading safetensors checkpoints: headers alone, or tensor by tensor."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from specdecode.contract import ConfigError

INDEX = "model.safetensors.index.json"


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint directory; ConfigError if one or all are missing."""
    if (path / INDEX).is_file():
        names = sorted(set(_read_json(path / INDEX).get("weight_map", {}).values()))
        missing = [name for name in names if not (path / name).is_file()]
        if missing:
            raise ConfigError(
                f"{path / INDEX} names {len(names)} weight files and {', '.join(missing)} is missing; "
                "fetch the checkpoint again or copy what is missing"
            )
        if not names:
            raise ConfigError(f"{path / INDEX} names no weight file; fetch the checkpoint again")
        return [path / name for name in names]
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    found = sorted(path.glob("*.safetensors"))
    if not found:
        pickled = sorted(path.glob("*.bin")) + sorted(path.glob("*.pt"))
        remedy = (
            f"only pickled weights are there ({pickled[0].name}): save them again as safetensors"
            if pickled
            else "fetch the weights, or use load_format='dummy' for random ones"
        )
        raise ConfigError(f"model directory {path} has no safetensors file; {remedy}")
    return found


def load_weights(path: str | Path) -> Iterator[tuple[str, torch.Tensor]]:
    """``(name, tensor)`` of every tensor of a checkpoint directory, on the CPU, one at a time."""
    for file in weight_files(Path(path)):
        with _open(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 (a safetensors handle is no mapping)
                yield name, tensors.get_tensor(name)


@contextlib.contextmanager
def _open(file: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        handle = safe_open(str(file), framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"weight file {file} is truncated or damaged ({error}); fetch it again") from error
    with handle as tensors:
        yield tensors


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold a JSON object, got {type(content).__name__}")
    return content
