"""The form that every published layout is read into: a code for each weight, a scale for each group."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import torch

Kind = Literal["fp8", "int8", "int4"]

#: The code of a weight of 0, where a matrix has no zeros of its own.
MIDDLE: dict[Kind, int] = {"fp8": 0, "int8": 128, "int4": 8}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class QuantizedMatrix:
    """``[out, in]`` weights, each ``(code - zero) * scale + offset``; equally many inputs in a row share a
    scale.

    Attributes:
        kind: what a code is: ``fp8`` a float8_e4m3fn, ``int8`` and ``int4`` an integer from 0 on.
        codes: ``[out, in]`` float8_e4m3fn or uint8.
        scales: ``[out, groups]`` float32, where ``groups`` divides ``in``.
        zeros: ``[out, groups]`` float32, or None: the middle of the codes.
        offsets: ``[out, groups]`` float32, or None: 0. With them there are no zeros, and none in the middle.
        order: ``[in]`` int64, the input that each column is of; None: its own. So groups may be of inputs
            that do not stand together (GPTQ's ``desc_act``).
    """

    kind: Kind
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    order: torch.Tensor | None = None

    def __post_init__(self) -> None:
        outputs, inputs = self.codes.shape
        groups = self.scales.shape[1]
        wanted = torch.float8_e4m3fn if self.kind == "fp8" else torch.uint8
        if self.codes.dtype is not wanted:
            raise ValueError(f"codes of {self.kind} are {wanted}, got {self.codes.dtype}")
        if self.scales.shape[0] != outputs or groups < 1 or inputs % groups:
            raise ValueError(f"scales {list(self.scales.shape)} do not divide {[outputs, inputs]} weights")
        if self.zeros is not None and self.zeros.shape != self.scales.shape:
            raise ValueError(f"zeros are {list(self.zeros.shape)}, scales {list(self.scales.shape)}")

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.codes.shape[1] // self.scales.shape[1]

    def dequantized(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """``[out, in]``, computed in float32 and rounded once; columns are the layer's inputs."""
        values = self.codes.float().unflatten(1, (self.scales.shape[1], self.group))
        if self.offsets is not None:
            values = values * self.scales[:, :, None] + self.offsets[:, :, None]
        else:
            zeros = MIDDLE[self.kind] if self.zeros is None else self.zeros[:, :, None]
            values = (values - zeros) * self.scales[:, :, None]
        weight = values.flatten(1).to(dtype)
        if self.order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.order, weight)

    def narrowed(self, dim: int, start: int, size: int) -> QuantizedMatrix:
        """``size`` outputs (``dim`` 0) or inputs (1) from ``start`` on; ValueError if groups forbid it."""
        codes = self.codes.view(torch.uint8).narrow(dim, start, size).contiguous().view(self.codes.dtype)
        if dim == 1 and self.order is not None:
            raise ValueError("inputs in an order of their own (desc_act) cannot be divided among ranks")
        if dim == 0 or self.scales.shape[1] > 1:
            unit = 1 if dim == 0 else self.group
            if start % unit or size % unit:
                raise ValueError(f"groups of {unit} inputs do not go into {size} inputs of a rank")
            start, size = start // unit, size // unit
            scales, zeros, offsets = (
                None if part is None else part.narrow(dim, start, size).contiguous()
                for part in (self.scales, self.zeros, self.offsets)
            )
            assert scales is not None
        else:
            scales, zeros, offsets = self.scales, self.zeros, self.offsets
        return dataclasses.replace(self, codes=codes, scales=scales, zeros=zeros, offsets=offsets)

    @staticmethod
    def stacked(parts: Sequence[QuantizedMatrix]) -> QuantizedMatrix | None:
        """Matrices of the same inputs, one below the other; None where they are not alike."""
        first = parts[0]
        if len(parts) == 1:
            return first
        for other in parts[1:]:
            if (other.kind, other.scales.shape[1]) != (first.kind, first.scales.shape[1]):
                return None
            if (other.offsets is None) != (first.offsets is None):
                return None
            if other.order is None or first.order is None:
                if other.order is not first.order:
                    return None
            elif not torch.equal(other.order, first.order):
                return None
        zeros = None
        if any(part.zeros is not None for part in parts):
            middle = MIDDLE[first.kind]
            zeros = torch.cat(
                [torch.full_like(part.scales, middle) if part.zeros is None else part.zeros for part in parts]
            )
        raw = [part.codes.view(torch.uint8) for part in parts]  # not every operation takes float8
        return QuantizedMatrix(
            kind=first.kind,
            codes=torch.cat(raw).view(first.codes.dtype),
            scales=torch.cat([part.scales for part in parts]),
            zeros=zeros,
            offsets=None if first.offsets is None else torch.cat([part.offsets for part in parts]),  # type: ignore[misc]
            order=first.order,
        )

    @staticmethod
    def random(
        kind: Kind, outputs: int, inputs: int, groups: int, *, std: float, generator: torch.Generator
    ) -> QuantizedMatrix:
        """Random weights of about that standard deviation, on the generator's device."""
        device, shape = generator.device, (outputs, inputs)
        if kind == "fp8":
            codes = torch.empty(shape, dtype=torch.bfloat16, device=device)
            codes, scale = codes.normal_(generator=generator).to(torch.float8_e4m3fn), std
        else:
            levels = 256 if kind == "int8" else 16
            codes = torch.randint(levels, shape, dtype=torch.uint8, device=device, generator=generator)
            scale = std / (levels / 12**0.5)
        noise = torch.rand((outputs, groups), device=device, generator=generator)
        return QuantizedMatrix(kind=kind, codes=codes, scales=scale * (0.9 + 0.2 * noise))
