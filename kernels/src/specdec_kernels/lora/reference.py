"""What adapters add, in torch, with the kernels' roundings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F


def lora_delta(
    x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, slots: torch.Tensor, parts: Sequence[int]
) -> torch.Tensor:
    rank = b.shape[2]
    delta = x.new_zeros(x.shape[0], b.shape[1])
    for slot in range(a.shape[0]):
        middle = F.linear(x.float(), a[slot].float()).to(x.dtype).float().split(rank, 1)
        below = b[slot].float().split(tuple(parts))
        added = torch.cat([F.linear(*pair) for pair in zip(middle, below, strict=True)], 1)
        delta = torch.where((slots == slot)[:, None], added.to(x.dtype), delta)
    return delta
