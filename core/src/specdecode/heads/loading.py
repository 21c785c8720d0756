"""Weights of heads into their places."""

from __future__ import annotations

import torch

from ..layers.linear import Linear
from ..layers.packed import Packable, dense_form
from ..models import can_fuse


def fill_rows(table: torch.Tensor, tensor: torch.Tensor) -> None:
    """A table whose padding may be another: rows beyond it are left out, missing ones are 0.

    Args:
        table: ``[V, ...]``, written.
        tensor: ``[V', ...]``.
    """
    rows = min(len(table), len(tensor))
    table[:rows] = tensor[:rows].to(table.device, table.dtype)
    table[rows:] = 0


def take_weights(module: torch.nn.Module, other: torch.nn.Module) -> None:
    """Have ``module`` compute with the weights of ``other``, an equal one, and keep the addresses it has."""
    module.load_state_dict(other.state_dict())
    for own, new in zip(module.modules(), other.modules(), strict=True):
        if isinstance(own, Packable) and isinstance(new, Packable):
            own.take_packed(new)


def pack_linears(module: torch.nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Give the linear layers of ``module`` the form in which a CPU is fastest; nothing elsewhere.

    Nor where fused products are forced on a CPU, which take weights as they are stored.
    """
    if device.type != "cpu" or can_fuse(dtype, device):
        return
    if (form := dense_form(dtype, exact=False)) is not None:
        for part in module.modules():
            if isinstance(part, Linear):
                part.pack(form)
