"""Checkpoints of heads, written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


def write_checkpoint(
    path: str | Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    *,
    file: str = "model.safetensors",
) -> Path:
    """Write a directory, made where it is not there, with ``config.json`` and one file of tensors.

    Args:
        config: fields that are None are left out.
        file: its name; :func:`save_tensors` goes by its ending.

    Returns:
        ``path``.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    save_tensors(path / file, tensors)
    said = {key: value for key, value in config.items() if value is not None}
    (path / "config.json").write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
    return path


def save_tensors(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """As safetensors, or pickled where the file's name ends in ``.pt`` or ``.bin``."""
    held = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if file.suffix in (".pt", ".bin"):
        torch.save(held, file)
        return
    from safetensors.torch import save_file

    save_file(held, file, metadata={"format": "pt"})
