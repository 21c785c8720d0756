"""Weights of heads into their places."""

from __future__ import annotations

import torch

from ..layers.linear import Linear
from ..layers.packed import dense_form


def fill_rows(table: torch.Tensor, tensor: torch.Tensor) -> None:
    """A table whose padding may be another: rows beyond it are left out, missing ones are 0.

    Args:
        table: ``[V, ...]``, written.
        tensor: ``[V', ...]``.
    """
    rows = min(len(table), len(tensor))
    table[:rows] = tensor[:rows].to(table.device, table.dtype)
    table[rows:] = 0


def pack_linears(module: torch.nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Give the linear layers of ``module`` the form in which a CPU is fastest; nothing elsewhere."""
    if device.type == "cpu" and (form := dense_form(dtype, exact=False)) is not None:
        for part in module.modules():
            if isinstance(part, Linear):
                part.pack(form)
