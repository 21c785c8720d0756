"""Weights in the form in which their products with a few rows are fastest on a CPU.

Packing happens once, after a model is loaded; a packed layer takes no more weights. The forms here
have *invariant* rows: the bits of a row do not depend on how many rows stand beside it.
"""

from __future__ import annotations

from typing import Protocol

import torch

#: Rows that oneDNN lays weights out for.
_ROWS_HINT = 8


class PackedWeight(Protocol):
    """``x [T, in] -> [T, out]``."""

    num_bytes: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


def onednn_available(dtype: torch.dtype) -> bool:
    """Whether this build and processor have oneDNN's packed product for ``dtype``."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32


class OneDnnWeight:
    """A weight in oneDNN's blocked layout.

    oneDNN splits the sum over a long input in another way for one row than for several, so a row
    alone is computed twice, which costs no further reading of the weight.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.num_bytes = weight.numel() * weight.element_size()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        if rows == 1:
            x = x.expand(2, -1).contiguous()
        y = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y[:1] if rows == 1 else y


class Int8Weight:
    """Weight-only int8: a scale for each output, symmetric; activations stay bfloat16."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        scale = weight.float().abs().amax(1).clamp_(min=torch.finfo(torch.float32).tiny) / 127
        self._weight = (weight.float() / scale[:, None]).round_().to(torch.int8)
        self._scale = scale.to(torch.bfloat16)
        self._bias = bias
        self.num_bytes = self._weight.numel() + 2 * self._scale.numel()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = torch._weight_int8pack_mm(x.contiguous(), self._weight, self._scale)
        return y if self._bias is None else y + self._bias
