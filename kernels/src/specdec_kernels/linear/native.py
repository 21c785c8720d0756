"""The products by the C++ kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..native import DTYPES, has_int8, library, takes
from .packing import GROUP, PackedCodes, PackedMatrix

_KINDS = {"int4": 0, "int8": 1, "fp8": 2}
#: Activations that become bytes share a scale in groups of so many, or twice as many.
_BYTES_STEP = 32


def can_multiply(x: torch.Tensor, weight: PackedMatrix) -> bool:
    """Whether the kernels are there, and for int8 the processor's product of bytes."""
    return takes(x) and (weight.values.dtype is x.dtype if weight.scales is None else has_int8())


def dense_linear(x: torch.Tensor, weight: PackedMatrix, bias: torch.Tensor | None) -> torch.Tensor:
    padding = weight.padded_in - weight.in_features
    x = F.pad(x, (0, padding)) if padding else x.contiguous()
    rows = x.shape[0]
    out = torch.empty((rows, weight.out_features), dtype=x.dtype)
    library().specdec_dense_linear(  # type: ignore[union-attr]  # `can_multiply` asked for it
        DTYPES[x.dtype],
        x.data_ptr(),
        weight.values.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        rows,
        weight.padded_in,
        weight.out_features,
        torch.get_num_threads(),
    )
    return out


def int8_linear(x: torch.Tensor, weight: PackedMatrix, bias: torch.Tensor | None) -> torch.Tensor:
    assert weight.scales is not None
    x = x.contiguous()
    out = torch.empty((x.shape[0], weight.out_features), dtype=x.dtype)
    library().specdec_int8_linear(  # type: ignore[union-attr]
        DTYPES[x.dtype],
        x.data_ptr(),
        weight.values.data_ptr(),
        weight.scales.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        x.shape[0],
        weight.in_features,
        weight.padded_in // GROUP,
        weight.out_features,
        torch.get_num_threads(),
    )
    return out


def codes_linear(x: torch.Tensor, weight: PackedCodes, bias: torch.Tensor | None) -> torch.Tensor:
    x = x.contiguous() if weight.order is None else x.index_select(1, weight.order)
    out = torch.empty((x.shape[0], weight.out_features), dtype=x.dtype)
    library().specdec_quantized_linear(  # type: ignore[union-attr]
        DTYPES[x.dtype],
        _KINDS[weight.kind],
        weight.scales.dtype is torch.float16,
        as_bytes(x.dtype, weight),
        x.data_ptr(),
        weight.values.data_ptr(),
        weight.scales.data_ptr(),
        0 if weight.offsets is None else weight.offsets.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        x.shape[0],
        weight.in_features,
        weight.padded_in,
        weight.group,
        weight.out_features,
        torch.get_num_threads(),
    )
    return out


def as_bytes(dtype: torch.dtype, weight: PackedCodes) -> bool:
    """Whether activations are quantised too."""
    return dtype is torch.bfloat16 and weight.kind != "fp8" and weight.group % _BYTES_STEP == 0 and has_int8()
