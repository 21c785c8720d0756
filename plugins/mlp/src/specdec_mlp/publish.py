"""Speculators in their public layout: names, fields and files, as the loaders of others read them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from specdecode.contract import ConfigError
from specdecode.heads.files import write_checkpoint

from .layouts import PREFIX


def published(
    weights: Mapping[str, torch.Tensor],
    *,
    n_predict: int,
    tied: bool,
    scale_input: bool,
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """``config.json`` and the stored tensors.

    Args:
        weights: by canonical name (:mod:`specdec_mlp.layouts`); of tied ones each once.

    Raises:
        ConfigError: the weights of step 0 are not there.
    """
    missing = [name for name in ("emb.0.weight", "proj.0.weight") if name not in weights]
    if missing:
        raise ConfigError(f"an MLP speculator has {', '.join(missing)}: give the weights of step 0")
    vocab_size, inner = weights["emb.0.weight"].shape
    emb_dim = weights["proj.0.weight"].shape[1]
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "emb_dim": emb_dim,
        "inner_dim": inner,
        "vocab_size": vocab_size,
        "n_predict": n_predict,
        "n_candidates": 5,
        "top_k_tokens_per_head": [max(5 - step, 1) for step in range(n_predict)],
        "tie_weights": tied,
        "scale_input": scale_input,
    }
    return config, {f"{PREFIX}{name}": tensor for name, tensor in weights.items()}


def write(
    path: str | Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    *,
    form: Literal["safetensors", "bin"] = "safetensors",
) -> Path:
    """Write what :func:`published` gives; the directory is made if it is not there."""
    file = "pytorch_model.bin" if form == "bin" else "model.safetensors"
    return write_checkpoint(path, config, tensors, file=file)
