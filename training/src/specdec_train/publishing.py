"""Writing a checkpoint in its public layout."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from specdecode.models.weights import INDEX

from .recipe import Checkpoint
from .texts import with_replacement, write_json

_READABLE = 0o644


def write_checkpoint(
    checkpoint: Checkpoint, path: Path, target: Path, *, dtype: torch.dtype, shard_bytes: int = 1 << 32
) -> Path:
    """Write ``config.json``, the weights, an index if they take several files, and what is copied.

    Args:
        path: directory, made if it is not there; weight files of an earlier call are removed.
        target: the target's directory, from which ``checkpoint.copied`` are taken.
        dtype: of floating tensors.
        shard_bytes: most bytes of tensors in one file.

    Returns:
        ``path``.
    """
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    for old in [*path.glob("*.safetensors"), path / INDEX]:
        old.unlink(missing_ok=True)
    held = {
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype).contiguous()
        for name, tensor in checkpoint.tensors.items()
    }
    shards = _shards(held, shard_bytes)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = "model.safetensors"
        if len(shards) > 1:
            file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        part = {name: held[name] for name in names}
        with_replacement(
            path / file, lambda temporary, part=part: save_file(part, temporary, {"format": "pt"})
        )
        (path / file).chmod(_READABLE)  # safetensors writes files for their owner alone
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        size = sum(tensor.nbytes for tensor in held.values())
        write_json(path / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
    name = str(dtype).removeprefix("torch.")
    write_json(path / "config.json", {**checkpoint.config, "dtype": name, "torch_dtype": name})
    for copied in checkpoint.copied:
        if (target / copied).is_file():
            shutil.copyfile(target / copied, path / copied)
    return path


def _shards(tensors: Mapping[str, torch.Tensor], most: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name in sorted(tensors):
        if shards[-1] and size + tensors[name].nbytes > most:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensors[name].nbytes
    return shards
