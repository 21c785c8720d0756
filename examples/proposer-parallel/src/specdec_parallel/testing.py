"""Drafters that nobody trained, for tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from specdecode.contract import TargetInfo
from specdecode.heads.files import write_checkpoint
from specdecode.heads.untrained import RandomWeights

from specdec_parallel.checkpoint import DrafterShape


def shape_for(target: TargetInfo, **sizes: Any) -> DrafterShape:
    return DrafterShape(
        **{
            "target_hidden_size": target.hidden_size,
            "hidden_size": 24,
            "intermediate_size": 32,
            "num_layers": 2,
            "num_heads": 3,
            "num_kv_heads": 1,
            "head_dim": 8,
            "num_draft_tokens": 4,
            "taps": (1, "final"),
            **sizes,
        }
    )


def write_drafter(path: Path, shape: DrafterShape, seed: int = 0, **config: Any) -> Path:
    """A checkpoint with random weights; ``config``: further fields, None takes one out."""
    weights = RandomWeights(seed)
    tensors = {
        name: weights.norm(*size)
        if name.endswith("norm.weight")
        else weights.normal(*size, std=size[-1] ** -0.5)
        for name, size in shape.tensors().items()
    }
    tensors["mask"] = torch.randn(shape.hidden_size, generator=weights.generator)
    return write_checkpoint(path, {**shape.config(), **config}, tensors)


def drafter(name: str, **keys: Any) -> Callable[[Any], Mapping[str, Any]]:
    """Keys of the method for the kit, with a drafter that is written for the kit's target."""

    def config(toy: Any) -> dict[str, Any]:
        return {"model": str(write_drafter(Path(toy.path).parent / name, shape_for(toy.info))), **keys}

    return config
