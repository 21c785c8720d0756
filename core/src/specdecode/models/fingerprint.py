"""Which model it is, whatever file it came in: for what was made for one model and no other."""

from __future__ import annotations

import hashlib
import json

import torch

from .files import ModelFiles
from .weights import load_weights

#: The weight that is looked at: small, stored whole by every quantization, and changed by any training.
_FINAL_NORMS = ("model.norm.weight", "norm.weight", "model.text_model.norm.weight")
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


def fingerprint(files: ModelFiles) -> str | None:
    """16 hexadecimal digits of a model's sizes and its final norm; None if it has none of that name.

    Equal for a bfloat16 checkpoint, its float32 copy and a GGUF file of it, however that is quantized, since
    norms are not and are compared in bfloat16. Reads the headers of the weight files and one vector.
    """
    norm = next((tensor for _, tensor in load_weights(files.path, _FINAL_NORMS)), None)
    if norm is None:
        return None
    told = [files.architecture, *(getattr(files.hf_config, name, None) for name in _SIZES)]
    stored = norm.to(torch.bfloat16).view(torch.int16).numpy().tobytes()
    return hashlib.sha256(json.dumps(told).encode() + stored).hexdigest()[:16]
