"""Heads in their public layouts: names, fields and files, as the loaders of others read them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from specdecode.contract import ConfigError
from specdecode.heads.files import write_checkpoint

from .layouts import LAYOUTS, stored_name
from .spec import CHOICES

#: Layout -> name of its file of weights, without the suffix.
_FILES = {"medusa-1": "medusa_lm_head", "head-only": "medusa_lm_head", "vllm": "model"}


def published(
    layout: str,
    weights: Mapping[str, torch.Tensor],
    *,
    vocab_size: int,
    base_model: str | None = None,
    choices: Sequence[Sequence[int]] | None = None,
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """``config.json`` and the tensors of a layout.

    Args:
        layout: of :data:`~specdec_medusa.layouts.LAYOUTS`. ``medusa-2`` gives what is added to the target's
            own config and shards.
        weights: by canonical name (:mod:`specdec_medusa.layouts`).
        vocab_size: the target's.
        base_model: name of the target.
        choices: the tree to draft, by merit.

    Raises:
        ConfigError: the layout is unknown, or has no place for one of the weights.
    """
    if layout not in LAYOUTS:
        raise ConfigError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    blocks = [match for name in weights if (match := re.fullmatch(r"blocks\.(\d+)\.(\d+)\.weight", name))]
    heads, layers = (1 + max(int(match[group]) for match in blocks) for group in (1, 2))
    fits = {"vllm": True, "head-only": not any(name.startswith("out.") for name in weights)}
    if not fits.get(layout, "out.0.weight" in weights):
        remedy = "give each head an output layer" if layout != "head-only" else "leave out output layers"
        raise ConfigError(f"the layout {layout!r} has no place for these heads: {remedy}")
    config: dict[str, Any] = {"medusa_num_heads": heads, "medusa_num_layers": layers}
    if layout == "head-only":
        config["version"] = "2"
    if layout == "vllm":
        token_map = weights.get("token_map")
        config = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": weights["blocks.0.0.weight"].shape[0],
            "vocab_size": vocab_size,
            "num_heads": heads,
            "num_hidden_layers": layers,
            "max_paths": 64,
            "topk": 10,
            "truncated_vocab_size": vocab_size if token_map is None else len(token_map),
            "medusa_fc_bias": "blocks.0.0.bias" in weights,
            "original_lm_head": "out.0.weight" not in weights,
        }
    if base_model is not None and layout != "medusa-2":
        config["base_model_name_or_path"] = base_model
    if choices is not None:
        config[CHOICES] = [list(path) for path in choices]
    return config, {stored_name(layout, name, layers): tensor for name, tensor in weights.items()}


def write(
    path: str | Path,
    layout: str,
    weights: Mapping[str, torch.Tensor],
    *,
    vocab_size: int,
    base_model: str | None = None,
    choices: Sequence[Sequence[int]] | None = None,
    form: Literal["safetensors", "pt"] = "safetensors",
) -> Path:
    """Write the checkpoint of a layout with files of its own, made where it is not there.

    Raises:
        ConfigError: see :func:`published`; or the layout is ``medusa-2``, which lies in the target's files.
    """
    config, tensors = published(
        layout, weights, vocab_size=vocab_size, base_model=base_model, choices=choices
    )
    if layout not in _FILES:
        raise ConfigError(f"the layout {layout!r} is written into the target's own checkpoint")
    return write_checkpoint(path, config, tensors, file=f"{_FILES[layout]}.{form}")
