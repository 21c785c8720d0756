"""Chooses the form of a loaded model's weights: packed for a CPU, or int8."""

from __future__ import annotations

import torch
from specdec_kernels.attention import HEAD_DIM_STEP
from specdec_kernels.native import DTYPES, library

from specdecode.contract import ConfigError
from specdecode.layers.linear import Linear
from specdecode.layers.packed import Int8Weight, dense_form

from .decoder import Decoder
from .transformers_backend import TransformersDecoder

#: What the keyword ``quantization`` may be.
QUANTIZATIONS = ("int8",)


def check_quantization(quantization: str | None, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse what cannot be packed, before any weight is read.

    Raises:
        ConfigError: names the field, the value and what works.
    """
    if quantization is None:
        return
    if quantization not in QUANTIZATIONS:
        raise ConfigError(f"quantization must be 'int8' or None, got {quantization!r}")
    if device.type != "cpu":
        raise ConfigError(
            f"quantization={quantization!r} works on a CPU only in this version, got device {device.type!r}"
        )
    if dtype is not torch.bfloat16:
        raise ConfigError(
            f"quantization={quantization!r} computes in bfloat16: set dtype='bfloat16' or 'auto', "
            f"got {str(dtype).removeprefix('torch.')!r}"
        )


def why_not_exact(dtype: torch.dtype, device: torch.device, head_dim: int) -> str | None:
    """Why the rows of a native decoder cannot be invariant, and what would help; None: they can."""
    if device.type != "cpu":
        return f"works on a CPU only in this version, got device {device.type!r}"
    if dtype not in DTYPES:
        return f"works in float32 and bfloat16, got dtype {str(dtype).removeprefix('torch.')!r}"
    if library() is None:
        return "takes the C++ kernels: install g++ or clang++, or name a compiler in CXX"
    if head_dim % HEAD_DIM_STEP:
        return f"takes attention heads of a multiple of {HEAD_DIM_STEP} dimensions, got {head_dim}"
    return None


def pack_weights(decoder: Decoder, *, quantization: str | None, exact: bool) -> None:
    """Pack all linear layers of a loaded decoder into the form that is fastest on a CPU."""
    if decoder.device.type != "cpu":
        return
    form = Int8Weight if quantization == "int8" else dense_form(decoder.dtype, exact=exact)
    if form is None:
        return
    for module in decoder.modules():
        if isinstance(module, Linear):
            module.pack(form)


def weight_bytes(decoder: Decoder | TransformersDecoder) -> int:
    """Bytes of all weights in memory; a table that embedding and output layer share counts once."""
    linear = [module for module in decoder.modules() if isinstance(module, Linear)]
    counted = {id(module.weight) for module in linear}
    rest = sum(p.nbytes for p in decoder.parameters() if id(p) not in counted and p.numel())
    biases = sum(module.bias.nbytes for module in linear if module.bias is not None)
    return rest - biases + sum(module.num_bytes for module in linear)
