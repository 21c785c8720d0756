"""The products in torch: to be compared with, and where there are no C++ kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .packing import GROUP, PackedMatrix


def dense_linear(x: torch.Tensor, weight: PackedMatrix, bias: torch.Tensor | None) -> torch.Tensor:
    y = F.linear(x, weight.unpacked())
    return y if bias is None else (y + bias).to(x.dtype)


def int8_linear(x: torch.Tensor, weight: PackedMatrix, bias: torch.Tensor | None) -> torch.Tensor:
    assert weight.scales is not None
    matrix = weight.unpacked().float()
    total = x.new_zeros((x.shape[0], weight.out_features), dtype=torch.float32)
    for part, columns in zip(x.float().split(GROUP, 1), matrix.split(GROUP, 1), strict=True):
        scale = part.abs().amax(1, keepdim=True) / 127
        whole = (part * torch.where(scale > 0, 1 / scale, 0)).round_()
        total += F.linear(whole, columns) * scale  # a float32 holds these sums exactly
    total *= weight.scales[: weight.out_features]
    return (total if bias is None else total + bias).to(x.dtype)
