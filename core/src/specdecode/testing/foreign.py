"""Tiny random checkpoints of models that the native decoder does not know, made by transformers itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .tiny import BOS, EOS, PAD, tiny_checkpoint

_SHARED = {
    "vocab_size": 300,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "dtype": "float32",
}
#: Of what is added to the weights, so that logits lie far enough apart to tell errors.
_STD = 0.08


def foreign_config(path: str | Path, model_type: str, fields: Mapping[str, Any]) -> Any:
    """Write the config alone of a model of 300 tokens; ``fields`` are those of its own."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **(_SHARED | dict(fields)))
    classes: Any = AutoModelForCausalLM._model_mapping
    config.architectures = [classes[type(config)].__name__]
    config.save_pretrained(path)
    return config


def foreign_checkpoint(
    path: str | Path, model_type: str, fields: Mapping[str, Any], *, seed: int = 0
) -> Path:
    """The same with random weights, and the tokenizer of :func:`tiny_checkpoint`; returns ``path``."""
    from transformers import AutoModelForCausalLM

    path = tiny_checkpoint(path)
    config = foreign_config(path, model_type, fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            parameter.data += _STD * torch.randn_like(parameter)
    model.save_pretrained(path)
    return path
