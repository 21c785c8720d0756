"""The formats of compressed-tensors: fp8, int8 and int4, as llm-compressor writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from specdec_kernels.quantized import MIDDLE, Kind, QuantizedMatrix

from .fp8 import FP8Layout
from .scheme import Layout, Scheme, Target, Tensors, names, only
from .unpacking import expect, kind_of, sorted_by_group, unpack

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")


@attrs.frozen(kw_only=True)
class IntegerLayout:
    """Integers, stored as int8 (``weight``), or with half their range added in words (``weight_packed``).

    Words hold neighbouring inputs, or for ``weight_zero_point`` neighbouring outputs; scales are
    ``[out, groups]``.
    """

    bits: int
    group_size: int  #: -1: all inputs
    packed: bool
    kind: Kind
    key: str
    others: tuple[str, ...] = ("weight", "weight_scale", "weight_zero_point", "weight_g_idx")

    def groups(self, inputs: int) -> int:
        return 1 if self.group_size == -1 else max(1, inputs // self.group_size)

    def matrix(self, stored: Tensors, outputs: int, inputs: int) -> QuantizedMatrix:
        groups, count, middle = self.groups(inputs), 32 // self.bits, MIDDLE[self.kind]
        shapes = ((outputs, groups), (outputs,), (), (1,)) if groups == 1 else ((outputs, groups),)
        scales = expect("weight_scale", stored["weight_scale"], *shapes).float().reshape(-1, groups)
        zeros = stored.get("weight_zero_point")
        if self.packed:
            words = expect("weight_packed", stored["weight_packed"], (outputs, -(-inputs // count)))
            codes = unpack(words, self.bits)[:, :inputs].contiguous()
            if zeros is not None:
                expect("weight_zero_point", zeros, (-(-outputs // count), groups))
                zeros = unpack(zeros.T.contiguous(), self.bits)[:, :outputs].T.float()
        else:
            weight = expect("weight", stored["weight"], (outputs, inputs))
            codes = (weight.to(torch.int16) + middle).to(torch.uint8)
            zeros = None if zeros is None else zeros.float().reshape(-1, groups) + middle
        codes, order = sorted_by_group(codes, stored.get("weight_g_idx"), groups)
        return QuantizedMatrix(
            kind=self.kind,
            codes=codes,
            scales=scales.expand(outputs, groups).contiguous(),
            zeros=None if zeros is None else zeros.expand(outputs, groups).contiguous(),
            order=order,
        )


def read(config: Mapping[str, Any]) -> Scheme:
    """The scheme of a config; ValueError for what is not supported."""
    sparsity = config.get("sparsity_config") or {}
    only(sparsity, "format", "dense", default="dense")
    form = str(config.get("format") or "")
    targets = []
    for name, group in (config.get("config_groups") or {}).items():
        if group.get("weights") is None:
            raise ValueError(f"{name} has no weights")
        layout = _layout(group["weights"], str(group.get("format") or form))
        targets.append(Target(layout=layout, patterns=tuple(map(str, group.get("targets") or ("Linear",)))))
    if not targets:
        raise ValueError("config_groups is empty")
    targets.sort(key=lambda target: "Linear" in target.patterns)  # named modules come first
    return Scheme(method="compressed-tensors", targets=tuple(targets), ignored=names(config, "ignore"))


def _layout(weights: Mapping[str, Any], form: str) -> Layout:
    if form not in _FORMATS:
        raise ValueError(f"format is {form!r}, and can be {', '.join(_FORMATS)}")
    if weights.get("dynamic"):
        raise ValueError("weights are dynamic")
    strategy = only(weights, "strategy", "tensor", "channel", "group", "block", default="tensor")
    if only(weights, "type", "float", "int", default="int") == "float":
        only(weights, "num_bits", 8)
        if strategy == "group":
            raise ValueError("fp8 weights have groups")
        size = weights.get("block_structure")
        if strategy != "block":
            return FP8Layout(block=None)
        if not isinstance(size, list | tuple) or len(size) != 2:
            raise ValueError(f"block_structure is {size!r}, and must be two numbers")
        return FP8Layout(block=(int(size[0]), int(size[1])))
    bits, packed = only(weights, "num_bits", 4, 8), form == "pack-quantized"
    if strategy == "block" or (bits == 4 and not packed):
        raise ValueError(f"int{bits} weights by {strategy} in {form}")
    return IntegerLayout(
        bits=bits,
        group_size=int(weights.get("group_size") or 128) if strategy == "group" else -1,
        packed=packed,
        kind=kind_of(bits),
        key="weight_packed" if packed else "weight_scale",
    )
