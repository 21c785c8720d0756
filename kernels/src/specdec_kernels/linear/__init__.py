"""Products of few rows with packed weights."""

from __future__ import annotations

import torch

from . import native, reference
from .packing import GROUP, PackedCodes, PackedMatrix, pack, pack_codes, pack_int8


def packed_linear(x: torch.Tensor, weight: PackedMatrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ W^T + b``; in the C++ kernels a row's bits do not depend on the rows beside it.

    With int8 weights activations are quantised too, as they come: a weight has one scale for each
    output, an activation one for each token and group of :data:`GROUP` inputs, both symmetric.

    Args:
        x: ``[T, in]``, float32 or bfloat16, the dtype of a weight that is not int8.
        bias: ``[out]`` float32.

    Returns:
        ``[T, out]`` of the dtype of ``x``; with int8, NaN where a token's input is not finite.
    """
    chosen = native if native.can_multiply(x, weight) else reference
    if weight.scales is None:
        return chosen.dense_linear(x, weight, bias)
    return chosen.int8_linear(x, weight, bias)


def codes_linear(x: torch.Tensor, weight: PackedCodes, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ W^T + b`` with quantised weights, by the C++ kernels alone; a row's bits are its own.

    float32 activations are multiplied as they are. Where the processor multiplies bytes (VNNI), bfloat16 ones
    become int8 before they meet integer weights, with a scale for each token and 32 or 64 inputs.

    Args:
        x: ``[T, in]``, float32 or bfloat16.
        bias: ``[out]`` float32.
    """
    return native.codes_linear(x, weight, bias)


__all__ = [
    "GROUP", "PackedCodes", "PackedMatrix", "codes_linear", "pack", "pack_codes", "pack_int8",
    "packed_linear",
]  # fmt: skip
