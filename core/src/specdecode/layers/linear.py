"""Linear layers, fused and laid out for tensor parallelism.

A column-parallel layer would give each rank a share of every one of its output parts, a
row-parallel layer a share of its inputs, the sum of the ranks' outputs being the result. Weights
enter through :meth:`Linear.load` alone, part by part as checkpoints store them, which is where a
rank would take its share.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from .packed import PackedWeight


class Layout(enum.Enum):
    """How a weight of ``out`` outputs and ``in`` inputs lies in memory."""

    ROWS = "rows"  #: ``[out, in]``, as checkpoints store it
    COLUMNS = "columns"  #: ``[in, out]``


def layout_for(device: torch.device, dtype: torch.dtype) -> Layout:
    """The faster layout for a few rows: on a CPU in float32 ``x @ w``, by up to half from 2 to 8 rows."""
    return Layout.COLUMNS if device.type == "cpu" and dtype is torch.float32 else Layout.ROWS


class Linear(torch.nn.Module):
    """``x @ W^T + b`` whose outputs are named parts, one behind the other.

    Args:
        in_features: inputs.
        parts: name -> number of outputs, in the order of the outputs.
        bias: whether there is a bias.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = sum(parts.values())
        self.layout = layout_for(device, dtype)
        self._packed: PackedWeight | None = None
        self._parts: dict[str, slice] = {}
        start = 0
        for name, size in parts.items():
            self._parts[name] = slice(start, start + size)
            start += size
        rows = (self.out_features, in_features)
        shape = rows if self.layout is Layout.ROWS else rows[::-1]
        self.weight = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
        self.bias = (
            torch.nn.Parameter(
                torch.empty(self.out_features, dtype=dtype, device=device), requires_grad=False
            )
            if bias
            else None
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of weight and bias in memory."""
        weight = self.weight.nbytes if self._packed is None else self._packed.num_bytes
        return weight + (0 if self.bias is None else self.bias.nbytes)

    def pack(self, form: Callable[[torch.Tensor, torch.Tensor | None], PackedWeight]) -> None:
        """Replace the weight by a packed form of it; nothing can be loaded any more."""
        weight = self.weight.data if self.layout is Layout.ROWS else self.weight.data.t()
        self._packed = form(weight, None if self.bias is None else self.bias.data)
        self.weight = torch.nn.Parameter(weight.new_empty(0), requires_grad=False)

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self._parts)

    def load(self, kind: str, tensor: torch.Tensor, part: str | None = None) -> None:
        """Take a checkpoint's tensor, of one part or of all.

        Args:
            kind: "weight", with a tensor ``[out, in]``, or "bias", with ``[out]``.

        Raises:
            ValueError: the shape is another one, or there is no bias.
        """
        if kind == "bias":
            if self.bias is None:
                raise ValueError("this layer has no bias")
            target = self.bias.data
        else:
            target = self.weight.data if self.layout is Layout.ROWS else self.weight.data.t()
        if part is not None:
            target = target[self._parts[part]]
        copy_checked(target, tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, in] -> [T, out]``."""
        if self._packed is not None:
            return self._packed(x)
        if self.layout is Layout.ROWS:
            return F.linear(x, self.weight, self.bias)
        return x @ self.weight if self.bias is None else torch.addmm(self.bias, x, self.weight)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, {self.layout.value}"


class MergedColumnParallelLinear(Linear):
    """Several column-parallel layers of one input as one product."""


class ColumnParallelLinear(MergedColumnParallelLinear):
    """A layer that is sharded by its outputs."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(in_features, {"out": out_features}, bias=bias, dtype=dtype, device=device)


class QKVParallelLinear(MergedColumnParallelLinear):
    """Queries, keys and values in one product, sharded by heads: parts ``q``, ``k``, ``v``."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        kv = num_kv_heads * head_dim
        parts = {"q": num_heads * head_dim, "k": kv, "v": kv}
        super().__init__(hidden_size, parts, bias=bias, dtype=dtype, device=device)


class RowParallelLinear(Linear):
    """A layer that is sharded by its inputs."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(in_features, {"out": out_features}, bias=bias, dtype=dtype, device=device)


def copy_checked(target: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy, converting the dtype; ValueError on a shape that differs (``copy_`` would broadcast it)."""
    if target.shape != tensor.shape:
        raise ValueError(f"expected shape {list(target.shape)}, got {list(tensor.shape)}")
    if target.ndim == 2 and target.stride(0) == 1:
        # Into a transposed weight: torch's blocked transpose writes whole matrices only, so by way of one.
        target.t().copy_(tensor.t().contiguous())
    else:
        target.copy_(tensor)
