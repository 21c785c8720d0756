"""Weights that stay quantised, as layers hold them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from specdec_kernels.linear import codes_linear, pack_codes
from specdec_kernels.projection import product
from specdec_kernels.quantized import QuantizedMatrix, words_of


class WordWeight:
    """In the words that the fused products read, which decode them in registers.

    Attributes:
        words: what those products take in place of a weight.
    """

    def __init__(self, matrix: QuantizedMatrix, bias: torch.Tensor | None) -> None:
        self.words = words_of(matrix)
        self.num_bytes = self.words.num_bytes
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return product(x.contiguous(), self.words, self._bias)


class CodesWeight:
    """In the bytes that the C++ kernels decode."""

    def __init__(self, matrix: QuantizedMatrix, bias: torch.Tensor | None) -> None:
        self._codes = pack_codes(matrix)
        self._bias = None if bias is None else bias.float()
        self.num_bytes = self._codes.num_bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return codes_linear(x, self._codes, self._bias)


class DequantizedWeight:
    """Dequantised anew for each product: where no kernel reads it. Slow, but the memory is saved."""

    def __init__(self, matrix: QuantizedMatrix, bias: torch.Tensor | None) -> None:
        self._matrix, self._bias = matrix, bias
        parts = (matrix.codes, matrix.scales, matrix.zeros, matrix.offsets, matrix.order)
        self.num_bytes = sum(part.nbytes for part in parts if part is not None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._matrix.dequantized(x.dtype), self._bias)
