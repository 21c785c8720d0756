"""The layout of packed weights: sixteen outputs side by side, of each the inputs that fill four bytes."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F

from ..quantized import MIDDLE, Kind, QuantizedMatrix

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


@dataclasses.dataclass(frozen=True, eq=False)
class PackedCodes:
    """A quantised matrix as ``[out / 16, in / Q, 16, 4]`` bytes: a word of four bytes holds Q inputs of an
    output.

    Of int8 and fp8 four, of int4 eight: its bytes hold the first four in their lower halves.
    """

    kind: Kind
    values: torch.Tensor
    scales: torch.Tensor  #: ``[out / 16, groups, 16]`` float32, or float16 where that loses nothing
    offsets: torch.Tensor | None  #: the same, ``-zero * scale``; None: zeros are the middle of the codes
    order: torch.Tensor | None  #: ``[in]``, which input each column is of
    out_features: int
    in_features: int
    group: int  #: inputs that share a scale, padding included

    @property
    def num_bytes(self) -> int:
        held = (self.values, self.scales, self.offsets, self.order)
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    @property
    def padded_in(self) -> int:
        return self.group * self.scales.shape[1]


#: Inputs that a group is a multiple of, and a whole row is padded to.
CODES_STEP, _ROW_STEP = 8, 64


def pack_codes(matrix: QuantizedMatrix) -> PackedCodes:
    """Lay a quantised matrix out; ValueError where its groups are no multiples of :data:`CODES_STEP`."""
    outputs, inputs = matrix.shape
    group, groups = matrix.group, matrix.scales.shape[1]
    if groups > 1 and group % CODES_STEP:
        raise ValueError(f"groups of {group} inputs are no multiples of {CODES_STEP}")
    padding = -inputs % _ROW_STEP if groups == 1 else 0
    rows = -outputs % _OUTPUTS
    codes = F.pad(matrix.codes.view(torch.uint8), (0, padding, 0, rows))
    if matrix.kind == "int4":
        low, high = codes.unflatten(1, (-1, 2, 4)).unbind(2)
        codes = (low | high << 4).flatten(1)
    values = codes.unflatten(0, (-1, _OUTPUTS)).unflatten(2, (-1, 4)).transpose(1, 2).contiguous()
    scales, offsets = matrix.scales, matrix.offsets
    if matrix.zeros is not None and bool((matrix.zeros != MIDDLE[matrix.kind]).any()):
        offsets = -matrix.zeros * scales
    kept = [part for part in (scales, offsets) if part is not None]
    half = all(torch.equal(part.half().float(), part) for part in kept)

    def laid(part: torch.Tensor | None) -> torch.Tensor | None:
        if part is None:
            return None
        blocks = F.pad(part, (0, 0, 0, rows)).unflatten(0, (-1, _OUTPUTS)).transpose(1, 2)
        return blocks.to(torch.float16 if half else torch.float32).contiguous()

    packed = laid(scales)
    assert packed is not None
    return PackedCodes(
        matrix.kind, values, packed, laid(offsets), matrix.order, outputs, inputs, group + padding
    )


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
