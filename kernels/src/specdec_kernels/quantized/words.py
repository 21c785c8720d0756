"""Codes as the Triton kernels read them: in words of 16 bits, so that two weights are decoded at a time.

Inputs come in blocks of :data:`BLOCK`. Word ``j`` of a block of ``n`` words holds the inputs ``j``, ``j +
n``, ``j + 2 n``, ...: four of int4 (n = 32), two of int8 and fp8 (n = 64). So what one shift and one mask
take out of neighbouring words are neighbouring inputs, as a tensor core wants them side by side in a
register.

Bits of an integer stand together, those of the first input lowest. Those of fp8 are spread so that few
instructions bring them to where bfloat16 has them: of the first, the sign in bit 15 and the others in 10 to
4, where they belong; of the second, the exponent in 14 to 11 and the mantissa in 2 to 0. Bit 3 is the sign of
the neighbouring word's second: a turn of both words by four bits brings signs and exponents home.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F

from .codes import MIDDLE, Kind, QuantizedMatrix

#: Inputs of a block; rows are padded to whole blocks.
BLOCK = 128
#: Bits that an int4's zero takes of the word with its scale.
_ZERO_BITS = 8


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class WordMatrix:
    """A :class:`QuantizedMatrix` for the Triton kernels, to be given to them in place of a weight.

    Attributes:
        kind: as of the matrix.
        words: ``[out, padded in / weights a word]`` int16.
        params: ``[groups, out]``, contiguous: float32 scales; of int4 int32, a float32 scale whose lowest
            eight bits are the zero instead (scales in float16 and bfloat16 have none there).
        inputs: of a row, without the padding.
        order: ``[in]`` int64, which input each column is of; None: its own.
    """

    kind: Kind
    words: torch.Tensor
    params: torch.Tensor
    inputs: int
    order: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.words.shape[0], self.inputs

    @property
    def device(self) -> torch.device:
        return self.words.device

    @property
    def bits(self) -> int:
        """Of a code."""
        return 4 if self.kind == "int4" else 8

    @property
    def group(self) -> int:
        """Inputs that share a scale; a whole row's where it has one."""
        return self.inputs // self.params.shape[0]

    @property
    def num_bytes(self) -> int:
        order = 0 if self.order is None else self.order.nbytes
        return self.words.nbytes + self.params.nbytes + order

    @property
    def label(self) -> str:
        """Of weights that are read alike: what tiles are chosen by."""
        return self.kind if self.params.shape[0] == 1 else f"{self.kind}-{self.group}"

    def matrix(self) -> QuantizedMatrix:
        """What it was made of, but that zeros are always told."""
        blocks = self.words.unflatten(1, (-1, BLOCK * self.bits // 16)).int()
        if self.kind == "fp8":
            second = blocks & 7 | blocks >> 8 & 0x78 | _swapped(blocks) << 4 & 0x80
            planes = [blocks >> 8 & 0x80 | blocks >> 4 & 0x7F, second]
        else:
            mask = (1 << self.bits) - 1
            planes = [(blocks >> shift & mask) for shift in range(0, 16, self.bits)]
        codes = torch.cat(planes, 2).flatten(1)[:, : self.inputs].to(torch.uint8).contiguous()
        if self.kind != "int4":
            raw = codes.view(torch.float8_e4m3fn) if self.kind == "fp8" else codes
            return QuantizedMatrix(kind=self.kind, codes=raw, scales=self.params.T, order=self.order)
        keep = (1 << _ZERO_BITS) - 1
        return QuantizedMatrix(
            kind="int4",
            codes=codes,
            scales=(self.params & ~keep).view(torch.float32).T,
            zeros=(self.params & keep).float().T,
            order=self.order,
        )


def why_no_words(matrix: QuantizedMatrix) -> str | None:
    """Why the kernels cannot read a matrix; None: they can."""
    group, groups = matrix.group, matrix.scales.shape[1]
    step = 32 if matrix.kind == "int4" else 64
    if groups > 1 and group % BLOCK and (BLOCK % group or group % step):
        return f"groups of {group} inputs do not go into blocks of {BLOCK}"
    if matrix.offsets is not None:
        return "weights with offsets"
    if matrix.zeros is not None:
        if matrix.kind != "int4":
            if bool((matrix.zeros != MIDDLE[matrix.kind]).any()):
                return f"{matrix.kind} weights with zero points"
        elif bool(((matrix.zeros != matrix.zeros.round()) | (matrix.zeros < 0) | (matrix.zeros > 127)).any()):
            return "zero points that are no small integers"
    return None


def words_of(matrix: QuantizedMatrix) -> WordMatrix:
    """Lay a matrix out for the kernels; ValueError where :func:`why_no_words` says why it cannot be."""
    if reason := why_no_words(matrix):
        raise ValueError(reason)
    inputs = matrix.shape[1]
    bits = 4 if matrix.kind == "int4" else 8
    codes = F.pad(matrix.codes.view(torch.uint8), (0, -inputs % BLOCK))
    planes = codes.unflatten(1, (-1, 16 // bits, BLOCK * bits // 16))
    words = torch.zeros_like(planes[:, :, 0], dtype=torch.int16)
    if matrix.kind == "fp8":
        first, second = (plane.to(torch.int16) for plane in planes.unbind(2))
        words |= (first & 0x80) << 8 | (first & 0x7F) << 4
        words |= (second & 0x78) << 8 | second & 7 | _swapped(second & 0x80) >> 4
    else:
        for plane in range(16 // bits):
            words |= planes[:, :, plane].to(torch.int16) << (bits * plane)
    params = matrix.scales.T.contiguous()
    if matrix.kind == "int4":
        kept = 1 << _ZERO_BITS
        zeros = MIDDLE["int4"] if matrix.zeros is None else matrix.zeros.T.to(torch.int32)
        params = ((params.view(torch.int32) + kept // 2) // kept * kept) | zeros
    return WordMatrix(
        kind=matrix.kind, words=words.flatten(1), params=params, inputs=inputs, order=matrix.order
    )


def _swapped(words: torch.Tensor) -> torch.Tensor:
    """Each word's neighbour: the second's of the first, and the first's of the second."""
    return words.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
