"""Products grouped by expert, and their sums, by the C++ kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..native import DTYPES, library, takes
from .groups import Groups, PackedExperts

#: Elements from which several threads are worth their start.
_PARALLEL = 1 << 16


def can_multiply(x: torch.Tensor, weight: PackedExperts) -> bool:
    """Whether the kernels are there, for weights of the dtype of ``x``."""
    return takes(x) and weight.values.dtype is x.dtype


def can_combine(y: torch.Tensor) -> bool:
    """Whether ``y`` is contiguous."""
    return takes(y) and y.is_contiguous()


def packed_grouped_linear(x: torch.Tensor, weight: PackedExperts, groups: Groups) -> torch.Tensor:
    padding = weight.padded_in - weight.in_features
    x = F.pad(x, (0, padding)) if padding else x.contiguous()
    out = torch.empty((x.shape[0], weight.out_features), dtype=x.dtype)
    library().specdec_grouped_linear(  # type: ignore[union-attr]  # `can_multiply` asked for it
        DTYPES[x.dtype],
        x.data_ptr(),
        weight.values.data_ptr(),
        groups.offsets.data_ptr(),
        out.data_ptr(),
        len(weight.values),
        weight.padded_in,
        weight.out_features,
        torch.get_num_threads(),
    )
    return out


def combine(y: torch.Tensor, groups: Groups, weights: torch.Tensor) -> torch.Tensor:
    tokens, count = weights.shape
    out = torch.empty((tokens, y.shape[1]), dtype=y.dtype)
    library().specdec_combine_experts(  # type: ignore[union-attr]
        DTYPES[y.dtype],
        y.data_ptr(),
        groups.places.data_ptr(),
        weights.contiguous().data_ptr(),
        out.data_ptr(),
        tokens,
        count,
        y.shape[1],
        torch.get_num_threads() if y.numel() > _PARALLEL else 1,
    )
    return out
