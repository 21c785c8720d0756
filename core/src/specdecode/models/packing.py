"""Chooses the form of a loaded model's weights, and tells what the kernels promise of it."""

from __future__ import annotations

import torch
from specdec_kernels.attention import HEAD_DIM_STEP
from specdec_kernels.gpu.launching import DTYPES as GPU_DTYPES
from specdec_kernels.native import DTYPES, library

from specdecode.contract import ConfigError, TargetInfo
from specdecode.layers.experts import ExpertsLinear
from specdecode.layers.linear import Linear
from specdecode.layers.packed import Int8Weight, dense_form

from .decoder import Decoder
from .experts import Router
from .files import ModelFiles
from .fused import SWITCH, can_fuse
from .transformers_backend import TransformersDecoder

#: What the keyword ``quantization`` may be.
QUANTIZATIONS = ("int8", "gguf")


def check_quantization(
    quantization: str | None, dtype: torch.dtype, device: torch.device, files: ModelFiles
) -> None:
    """Refuse what cannot be packed, before any weight is read.

    Raises:
        ConfigError: names the field, the value and what works.
    """
    if quantization is None:
        return
    if quantization not in QUANTIZATIONS:
        raise ConfigError(f"quantization must be 'int8', 'gguf' or None, got {quantization!r}")
    if device.type != "cpu":
        raise ConfigError(
            f"quantization={quantization!r} works on a CPU only in this version, got device {device.type!r}"
        )
    if quantization == "gguf":
        if files.gguf is None:
            raise ConfigError(
                f"quantization='gguf' keeps the blocks of a GGUF file, and model {files.name!r} is none: "
                "give a .gguf file, or leave quantization out"
            )
        if dtype not in DTYPES:
            raise ConfigError(
                "quantization='gguf' computes in bfloat16 or float32, got dtype "
                f"{str(dtype).removeprefix('torch.')!r}: set one of them"
            )
        return
    if dtype is not torch.bfloat16:
        raise ConfigError(
            f"quantization={quantization!r} computes in bfloat16: set dtype='bfloat16' or 'auto', "
            f"got {str(dtype).removeprefix('torch.')!r}"
        )


def why_not_exact(dtype: torch.dtype, device: torch.device, target: TargetInfo) -> str | None:
    """Why the rows of a native decoder cannot be invariant, and what would help; None: they can.

    Where they can on a GPU, they are, whether it is asked for or not: its kernels have no other form.
    """
    if device.type not in ("cpu", "cuda"):
        return f"works on a CPU or a CUDA device, got device {device.type!r}"
    if dtype not in (DTYPES if device.type == "cpu" else GPU_DTYPES):
        return f"works in float32 and bfloat16, got dtype {str(dtype).removeprefix('torch.')!r}"
    if device.type == "cuda":
        return _why_not_on_gpu(dtype, device, target)
    if library() is None:
        return "takes the C++ kernels: install g++ or clang++, or name a compiler in CXX"
    if target.head_dim % HEAD_DIM_STEP:
        return f"takes attention heads of a multiple of {HEAD_DIM_STEP} dimensions, got {target.head_dim}"
    return None


def _why_not_on_gpu(dtype: torch.dtype, device: torch.device, target: TargetInfo) -> str | None:
    if not can_fuse(dtype, device):
        return f"takes the Triton kernels: install triton, and leave {SWITCH} out of the environment"
    from specdec_kernels.attention.gpu import can_attend  # needs Triton

    query = torch.empty(0, target.num_heads, target.head_dim, dtype=dtype, device=device)
    cache = torch.empty(0, 1, target.num_kv_heads, target.head_dim, dtype=dtype, device=device)
    if not can_attend(query, cache, cache, target.head_dim**-0.5):
        return (
            f"takes attention heads that the Triton kernel takes, got {target.num_heads} heads on "
            f"{target.num_kv_heads} KV heads of {target.head_dim} dimensions"
        )
    return None


def pack_weights(decoder: Decoder, *, quantization: str | None, exact: bool) -> None:
    """Pack all linear layers of a loaded decoder into the form that is fastest on a CPU."""
    if decoder.device.type != "cpu" or (decoder.fused and quantization is None):
        return
    decoder.fused = False  # its products take the weights as they are stored
    form = Int8Weight if quantization == "int8" else dense_form(decoder.dtype, exact=exact)
    if form is None:
        return
    scores = dense_form(torch.float32, exact=exact)
    for module in decoder.modules():
        if isinstance(module, Linear | ExpertsLinear):
            if isinstance(module, Linear) and module.packed:
                continue
            module.pack(form)
        elif isinstance(module, Router) and scores is not None:
            module.pack(scores)


def weight_bytes(decoder: Decoder | TransformersDecoder) -> int:
    """Bytes of all weights in memory; a table that embedding and output layer share counts once."""
    linear = [module for module in decoder.modules() if isinstance(module, Linear | ExpertsLinear)]
    counted = {id(module.weight) for module in linear}
    rest = sum(p.nbytes for p in decoder.parameters() if id(p) not in counted and p.numel())
    biases = sum(m.bias.nbytes for m in linear if isinstance(m, Linear) and m.bias is not None)
    return rest - biases + sum(module.num_bytes for module in linear)
