"""Tiny checkpoints in every quantised layout, and beside each the dense one that it means.

Weights are rounded to the nearest code. Words are put together number by number, from the layouts'
descriptions and not from the code that reads them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..models import load_weights
from .tiny import _save, tiny_checkpoint

#: Inputs that share a scale, in layouts with groups.
GROUP = 32
#: Rows and columns of a block, in layouts with blocks.
BLOCK = (16, 32)

#: A weight ``[out, in]`` to its tensors by the last part of their names, and what they mean.
Writer = Callable[[torch.Tensor], tuple[dict[str, torch.Tensor], torch.Tensor]]

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def quantized_checkpoint(
    path: str | Path,
    layout: str,
    family: str = "llama",
    *,
    plain: tuple[str, ...] = ("lm_head",),
    **changes: Any,
) -> tuple[Path, Path]:
    """Write a tiny checkpoint in a layout of :data:`LAYOUTS`, and the dense one of the same weights.

    Args:
        path: directory, made if it is not there.
        plain: parts of names of the modules that stay as they are.
        changes: arguments of :func:`~specdecode.testing.tiny.tiny_checkpoint`.

    Returns:
        Both directories: the quantised one, and the dense one, in float32.
    """
    config, write = LAYOUTS[layout]
    path = Path(path)
    quantised = tiny_checkpoint(path / "quantised", family, **changes)
    dense = tiny_checkpoint(path / "dense", family, **changes)
    tensors = dict(load_weights(dense))
    meant = dict(tensors)
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        linear = name.endswith("_proj.weight") or module == "lm_head"
        if not linear or any(part in module for part in plain):
            stored[name] = tensor
            continue
        written, meant[name] = write(tensor.float())
        stored |= {f"{module}.{kind}": part.contiguous() for kind, part in written.items()}
    _save(quantised, stored, shards=1)
    _save(dense, meant, shards=1)
    file = quantised / "config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text("utf-8")) | {"quantization_config": config}), "utf-8"
    )
    return quantised, dense


def _pack(codes: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """``[n, m]`` numbers, ``32 / bits`` of them to an int32, the first in the lowest bits."""
    count = 32 // bits
    rows = []
    for row in codes.tolist():
        words = []
        for start in range(0, len(row), count):
            word = 0
            for place in range(count):
                word |= int(row[start + (place if order is None else order[place])]) << (bits * place)
            words.append(word - (1 << 32) if word >= 1 << 31 else word)
        rows.append(words)
    return torch.tensor(rows, dtype=torch.int32)


def _grouped(
    weight: torch.Tensor, bits: int, *, symmetric: bool, size: int = GROUP
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes from 0 on, scales (float16) and zeros ``[out, groups]``, and the weight that they mean."""
    groups = weight.unflatten(1, (-1, size))
    highest = (1 << bits) - 1
    if symmetric:
        scales = groups.abs().amax(2) / (highest // 2)
        zeros = torch.full_like(scales, highest // 2 + 1)
    else:
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scales = (high - low) / highest
        zeros = (-low / scales).round().clamp(1, highest)
    scales = scales.half().clamp(min=1e-4).float()
    codes = ((groups / scales[..., None]).round() + zeros[..., None]).clamp(0, highest)
    meant = ((codes - zeros[..., None]) * scales[..., None]).flatten(1)
    return codes.flatten(1), scales, zeros, meant


def _awq(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    codes, scales, zeros, meant = _grouped(weight, 4, symmetric=False)
    return {
        "qweight": _pack(codes.T, 4, _AWQ_ORDER),
        "qzeros": _pack(zeros.T, 4, _AWQ_ORDER),
        "scales": scales.T.half(),
    }, meant


def _gptq(bits: int, *, symmetric: bool, less: int, by_activation: bool = False) -> Writer:
    def write(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        inputs = weight.shape[1]
        order = torch.arange(inputs)
        if by_activation:  # groups are of inputs that do not stand together
            order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
        codes, scales, zeros, meant = _grouped(weight[:, order], bits, symmetric=symmetric)
        places = torch.empty_like(order)
        places[order] = torch.arange(inputs)
        return {
            "qweight": _pack(codes[:, places], bits).T,
            "qzeros": _pack(zeros.T - less, bits),
            "scales": scales.T.half(),
            "g_idx": (places // GROUP).int(),
        }, meant[:, places]

    return write


def _compressed(bits: int, *, symmetric: bool, packed: bool = True, channel: bool = False) -> Writer:
    def write(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        size = weight.shape[1] if channel else GROUP
        codes, scales, zeros, meant = _grouped(weight, bits, symmetric=symmetric, size=size)
        middle = 1 << (bits - 1)
        written = {"weight_scale": scales.half()}
        if packed:
            written |= {"weight_packed": _pack(codes, bits), "weight_shape": torch.tensor(weight.shape)}
            if not symmetric:
                written["weight_zero_point"] = _pack(zeros.T, bits).T
        else:
            written["weight"] = (codes - middle).to(torch.int8)
        return written, meant

    return write


def _float8(strategy: str, scale: str = "weight_scale") -> Writer:
    def write(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        outputs, inputs = weight.shape
        rows, columns = {"tensor": (outputs, inputs), "channel": (1, inputs), "block": BLOCK}[strategy]
        whole = weight.abs().unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).amax((1, 3)) / 448
        wide = whole.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        codes = (weight / wide).to(torch.float8_e4m3fn)
        stored = whole.reshape(1) if strategy == "tensor" else whole
        return {"weight": codes, scale: stored}, codes.float() * wide

    return write


def _config_of(weights: dict[str, Any], form: str) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ["lm_head"],
    }


def _integers(
    bits: int, *, symmetric: bool = True, channel: bool = False, packed: bool = True
) -> dict[str, Any]:
    weights: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": symmetric}
    weights |= {"strategy": "channel"} if channel else {"strategy": "group", "group_size": GROUP}
    return _config_of(weights, "pack-quantized" if packed else "int-quantized")


def _floats(strategy: str) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True}
    if strategy == "block":
        weights["block_structure"] = list(BLOCK)
    return _config_of(weights, "float-quantized")


def _gptq_config(bits: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": GROUP, **more}


#: Layout -> ``quantization_config``, and what writes a weight.
LAYOUTS: dict[str, tuple[dict[str, Any], Writer]] = {
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
        _awq,
    ),
    "gptq": (_gptq_config(4, desc_act=False), _gptq(4, symmetric=False, less=1)),
    "gptq-v2": (_gptq_config(4, checkpoint_format="gptq_v2"), _gptq(4, symmetric=False, less=0)),
    "gptq-8bit": (_gptq_config(8, sym=True), _gptq(8, symmetric=True, less=1)),
    "gptq-desc-act": (
        _gptq_config(4, desc_act=True),
        _gptq(4, symmetric=True, less=1, by_activation=True),
    ),
    "fp8": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, _float8("tensor")),
    "fp8-block": (
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": list(BLOCK),
            "activation_scheme": "dynamic",
        },
        _float8("block", "weight_scale_inv"),
    ),
    "compressed-fp8-tensor": (_floats("tensor"), _float8("tensor")),
    "compressed-fp8-channel": (_floats("channel"), _float8("channel")),
    "compressed-fp8-block": (_floats("block"), _float8("block")),
    "compressed-int4": (_integers(4), _compressed(4, symmetric=True)),
    "compressed-int4-asymmetric": (_integers(4, symmetric=False), _compressed(4, symmetric=False)),
    "compressed-int8-channel": (
        _integers(8, channel=True, packed=False),
        _compressed(8, symmetric=True, packed=False, channel=True),
    ),
    "compressed-int8-group": (_integers(8), _compressed(8, symmetric=True)),
}
