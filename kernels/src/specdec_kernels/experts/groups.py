"""Rows in the order of their experts, and experts' weights as the C++ products take them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import torch

from ..linear import pack


@dataclasses.dataclass(frozen=True, eq=False)
class Groups:
    """``T`` tokens' ``k`` choices, ``P = T k`` rows, by expert; within one by token.

    Attributes:
        tokens: ``[P]`` int64, whose each row is.
        places: ``[T, k]`` int64, the row of each choice.
        offsets: ``[E + 1]`` int64: the rows of expert ``e`` are ``offsets[e]`` to ``offsets[e + 1]``.
    """

    tokens: torch.Tensor
    places: torch.Tensor
    offsets: torch.Tensor

    def touched(self) -> Iterator[tuple[int, slice]]:
        """The experts that have rows, each with these."""
        for expert, (begin, end) in enumerate(itertools.pairwise(self.offsets.tolist())):
            if begin < end:
                yield expert, slice(begin, end)


def group(ids: torch.Tensor, num_experts: int) -> Groups:
    """Group ``[T, k]`` int64 choices by expert."""
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(flat), device=ids.device)
    counts = torch.bincount(flat, minlength=num_experts)
    offsets = counts.new_zeros(num_experts + 1)
    torch.cumsum(counts, 0, out=offsets[1:])
    return Groups(order // ids.shape[1], places.view_as(ids), offsets)


@dataclasses.dataclass(frozen=True, eq=False)
class PackedExperts:
    """``[E, out, in]``, each expert laid out as a :class:`~specdec_kernels.linear.PackedMatrix`."""

    values: torch.Tensor  #: ``[E, out / 16, in / Q, 16, Q]``
    out_features: int
    in_features: int

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes

    @property
    def padded_in(self) -> int:
        return self.values.shape[2] * self.values.shape[4]


def pack_experts(weight: torch.Tensor) -> PackedExperts:
    """Lay ``[E, out, in]``, float32 or bfloat16, out, expert by expert."""
    first = pack(weight[0]).values
    values = first.new_empty((len(weight), *first.shape))
    for own, target in zip(weight, values, strict=True):
        target.copy_(pack(own).values)
    return PackedExperts(values, *weight.shape[1:])
