"""Which checkpoints are Medusa's, told by their tensors first."""

from __future__ import annotations

import re
from typing import Any

from specdecode.contract import CheckpointInfo, Match

from .layouts import canonical

_ARCHITECTURES = ("MedusaModel", "MedusaForCausalLM", "MedusaLMHeadModel")
_HYDRA = re.compile(r"hydra", re.IGNORECASE)


def kind_of(checkpoint: CheckpointInfo) -> str | None:
    """What tells that it has Medusa heads; None if it has none."""
    for name, info in checkpoint.tensors.items():
        meaning = canonical(name)
        if meaning and meaning.startswith("blocks.") and meaning.endswith(".weight"):
            if len(info.shape) == 2 and info.shape[0] == info.shape[1]:
                return f"{name} is a square layer of a head"
        elif _HYDRA.search(name):
            return f"{name} is of a variant of Medusa"
    return _said(checkpoint.config)


def _said(config: Any) -> str | None:
    if config.get("model_type") == "medusa":
        return "its config says model_type medusa"
    for architecture in config.get("architectures") or ():
        if architecture in _ARCHITECTURES:
            return f"its config says {architecture}"
    return "its config says medusa_num_heads" if "medusa_num_heads" in config else None


def recognize(checkpoint: CheckpointInfo) -> Match | None:
    reason = kind_of(checkpoint)
    return Match(reason) if reason else None
