"""Tensor descriptors: what a product loads in whole boxes, by the copy engine of an SM (TMA) on Hopper.

No thread then holds an address, so that registers are left for larger tiles. What lies outside of a
tensor comes as zero.
"""

from __future__ import annotations

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from .tiles import Tile

#: Addresses and strides are multiples of so many bytes, and a box has up to so many elements a side.
_ALIGNED, _LONGEST = 16, 256
#: Rows of the weights that an instruction takes at the least.
_ROWS = 64

Boxes = tuple[TensorDescriptor, TensorDescriptor, TensorDescriptor | None]


def boxes(weight: torch.Tensor, x: torch.Tensor, tile: Tile, pairs: int) -> Boxes | None:
    """Descriptors of the weights and of both parts of a tile's tokens; None: there can be none.

    Args:
        pairs: a tile is of rows ``i`` and ``i + pairs`` of each ``2 pairs`` rows, and one box of either
            half of it; 0: of rows as they stand.
    """
    outputs, inputs = weight.shape
    rows = tile.rows // 2 if pairs else tile.rows
    if inputs * weight.element_size() % _ALIGNED or not _ROWS <= rows <= _LONGEST:
        return None
    if any(tensor.device.type != "meta" and tensor.data_ptr() % _ALIGNED for tensor in (weight, x)):
        return None
    if pairs and outputs > 2 * pairs and pairs % rows:  # a tile would end in another head
        return None
    weights = TensorDescriptor(weight, [outputs, inputs], [inputs, 1], [rows, tile.inputs])
    first, second = (
        TensorDescriptor(x, list(x.shape), [inputs, 1], [count, tile.inputs]) if count else None
        for count in tile.tokens
    )
    assert first is not None
    return weights, first, second
