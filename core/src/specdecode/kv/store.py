"""The tensors behind the pool: KV layers of the target, and of the proposer on the same blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import numpy as np
import torch

from ..contract import KVSpec, Unsupported

LayerCache = tuple[torch.Tensor, torch.Tensor]


@attrs.frozen
class LayerShape:
    """One KV layer: a slot holds ``heads x k_dim`` keys and ``heads x v_dim`` values."""

    heads: int
    k_dim: int
    v_dim: int
    dtype: torch.dtype

    @property
    def slot_bytes(self) -> int:
        return self.heads * (self.k_dim + self.v_dim) * self.dtype.itemsize


def draft_layers(spec: KVSpec, default: torch.dtype) -> list[LayerShape]:
    """The layers a proposer declared.

    Raises:
        Unsupported: they are of a dtype that torch has not, or that is no floating-point one.
    """
    dtype = default if spec.dtype is None else getattr(torch, spec.dtype, None)
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise Unsupported(
            f"KVSpec.dtype {spec.dtype!r} is no floating-point dtype of torch; say for example 'bfloat16', "
            "or None for the target's"
        )
    return [LayerShape(spec.heads, spec.k_dim, spec.v_dim, dtype)] * spec.layers


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, not empty: a masked slot is still multiplied by a weight of 0, and 0 * NaN is NaN.

    On a CPU numpy's are taken from the system page by page as they are used; torch would touch all.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)


class KVStore:
    """Layers of target and drafts, each ``[num_blocks + 1, block_size, heads, dim]``; block 0 is null."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        target: Sequence[LayerShape],
        drafts: Sequence[Sequence[LayerShape]],
        device: torch.device,
    ) -> None:
        def allocate(shape: LayerShape) -> LayerCache:
            lead = (num_blocks + 1, block_size, shape.heads)
            return (
                _zeros((*lead, shape.k_dim), shape.dtype, device),
                _zeros((*lead, shape.v_dim), shape.dtype, device),
            )

        self.target: list[LayerCache] = [allocate(shape) for shape in target]
        self.drafts: list[list[LayerCache]] = [[allocate(shape) for shape in layers] for layers in drafts]

    def move(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy slots of the target's layers, as if all were read before any is written.

        Args:
            source, destination: ``[N]`` int64, physical slots.
        """
        for cache in self.target:
            for tensor in cache:
                slots = tensor.flatten(0, 1)
                flat = slots.view(torch.uint8) if slots.dtype.itemsize == 1 else slots  # not all know float8
                flat[destination] = flat[source]

    @staticmethod
    def block_bytes(
        block_size: int, target: Sequence[LayerShape], drafts: Sequence[Sequence[LayerShape]]
    ) -> int:
        """Bytes of one block over all layers."""
        layers = [*target, *(shape for group in drafts for shape in group)]
        return block_size * sum(shape.slot_bytes for shape in layers)
