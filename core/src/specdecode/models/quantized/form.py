"""In which form a quantised weight is computed with: the one that the decoder's kernels read."""

from __future__ import annotations

from collections.abc import Callable

import torch
from specdec_kernels.gpu import takes
from specdec_kernels.linear.packing import CODES_STEP
from specdec_kernels.native import DTYPES, library
from specdec_kernels.quantized import QuantizedMatrix, why_no_words

from specdecode.layers.packed import PackedWeight
from specdecode.layers.quantized import CodesWeight, DequantizedWeight, WordWeight

QuantizedForm = Callable[[QuantizedMatrix, torch.Tensor | None], PackedWeight]


def form_of(matrix: QuantizedMatrix, dtype: torch.dtype, *, fused: bool) -> QuantizedForm | str:
    """The form of a matrix, or why there is none and it is to be dequantised.

    Args:
        dtype: of the activations.
        fused: the decoder computes by the fused products, which take words alone.
    """
    if fused or takes(torch.empty(0, dtype=dtype, device=matrix.codes.device)):
        return why_no_words(matrix) or WordWeight
    if matrix.codes.device.type == "cpu" and dtype in DTYPES and library() is not None:
        grouped = matrix.scales.shape[1] > 1
        return DequantizedWeight if grouped and matrix.group % CODES_STEP else CodesWeight
    return DequantizedWeight
