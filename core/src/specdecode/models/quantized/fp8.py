"""Weights in float8_e4m3fn with scales by tensor, output or block, as DeepSeek and Qwen publish them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from specdec_kernels.quantized import Kind, QuantizedMatrix

from .scheme import Scheme, Target, Tensors, names, only
from .unpacking import expect


@attrs.frozen(kw_only=True)
class FP8Layout:
    """``weight [out, in]`` float8_e4m3fn and its scales, which it is multiplied by.

    A scale is one for all (``[]`` or ``[1]``), one an output (``[out]`` or ``[out, 1]``), or one a block
    (``[out / rows, in / columns]``, rounded up).
    """

    block: tuple[int, int] | None  #: rows and columns
    key: str = "weight_scale"
    kind: Kind = "fp8"
    others: tuple[str, ...] = ("weight",)

    def groups(self, inputs: int) -> int:
        return 1 if self.block is None or inputs % self.block[1] else inputs // self.block[1]

    def matrix(self, stored: Tensors, outputs: int, inputs: int) -> QuantizedMatrix:
        weight = expect("weight", stored["weight"], (outputs, inputs))
        if weight.dtype is not torch.float8_e4m3fn:
            raise ValueError(f"weight must be float8_e4m3fn, got {weight.dtype}")
        scales = self._scales(stored[self.key].float(), outputs, inputs)
        return QuantizedMatrix(kind="fp8", codes=weight, scales=scales)

    def _scales(self, scales: torch.Tensor, outputs: int, inputs: int) -> torch.Tensor:
        """``[out, groups]``."""
        if self.block is None:
            scales = expect(self.key, scales, (), (1,), (outputs,), (outputs, 1))
            return scales.reshape(-1, 1).expand(outputs, 1).contiguous()
        rows, columns = self.block
        scales = expect(self.key, scales, (-(-outputs // rows), -(-inputs // columns)))
        if inputs % columns and scales.shape[1] > 1:
            raise ValueError(f"blocks of {columns} inputs do not divide {inputs}")
        return scales.repeat_interleave(rows, 0)[:outputs].contiguous()


def read(config: Mapping[str, Any]) -> Scheme:
    """The scheme of a config; ValueError for what is not supported."""
    only(config, "fmt", "e4m3", "float8_e4m3fn", default="e4m3")
    only(config, "activation_scheme", "dynamic", "static", default="dynamic")
    size = config.get("weight_block_size")
    if size is not None and (len(size) != 2 or not all(isinstance(n, int) and n > 0 for n in size)):
        raise ValueError(f"weight_block_size is {size!r}, and must be two numbers")
    block = None if size is None else (size[0], size[1])
    layout = FP8Layout(block=block, key="weight_scale" if block is None else "weight_scale_inv")
    ignored = ("lm_head", *names(config, "modules_to_not_convert"), *names(config, "ignored_layers"))
    return Scheme(method="fp8", targets=(Target(layout=layout),), ignored=ignored)
