"""The layout of packed weights: sixteen outputs side by side, of each the inputs that fill four bytes."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F

#: Inputs of a token that share a scale, in int8.
GROUP = 64
_OUTPUTS = 16


@dataclasses.dataclass(frozen=True, eq=False)
class PackedMatrix:
    """``[out, in]`` as ``[out / 16, in / Q, 16, Q]``, padded by zeros; Q elements are four bytes.

    float32 and bfloat16 as they are; int8 as uint8 with 128 added, for the dot product of unsigned
    with signed bytes, and a scale for each output.
    """

    values: torch.Tensor
    scales: torch.Tensor | None  #: ``[padded out]`` float32
    out_features: int
    in_features: int

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + (0 if self.scales is None else self.scales.nbytes)

    @property
    def padded_in(self) -> int:
        return self.values.shape[1] * self.values.shape[3]

    def unpacked(self) -> torch.Tensor:
        """``[out, in]``; of int8 without the scales."""
        whole = self.values.transpose(1, 2).reshape(self.values.shape[0] * _OUTPUTS, self.padded_in)
        kept = whole[: self.out_features, : self.in_features]
        return kept if self.scales is None else (kept.to(torch.int16) - 128).to(torch.int8)


def pack(weight: torch.Tensor) -> PackedMatrix:
    """Lay ``[out, in]``, float32 or bfloat16, out."""
    quad = 4 // weight.element_size()
    return PackedMatrix(_laid_out(weight, quad, 0, quad), None, *weight.shape)


def pack_int8(weight: torch.Tensor) -> PackedMatrix:
    """Quantise ``[out, in]`` symmetrically, a scale for each output, and lay it out."""
    scales = weight.float().abs().amax(1) / 127
    whole = (weight.float() / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round_()
    values = _laid_out(whole.add_(128).to(torch.uint8), 4, 128, GROUP)
    return PackedMatrix(values, F.pad(scales, (0, -weight.shape[0] % _OUTPUTS)), *weight.shape)


def _laid_out(matrix: torch.Tensor, quad: int, zero: int, multiple: int) -> torch.Tensor:
    rows, columns = -matrix.shape[0] % _OUTPUTS, -matrix.shape[1] % multiple
    if rows or columns:
        matrix = F.pad(matrix, (0, columns, 0, rows), value=zero)
    shape = (matrix.shape[0] // _OUTPUTS, _OUTPUTS, matrix.shape[1] // quad, quad)
    return matrix.view(shape).transpose(1, 2).contiguous()
