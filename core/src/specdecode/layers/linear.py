"""Linear layers, fused and laid out for tensor parallelism.

A column-parallel layer would give each rank a share of every one of its output parts, a
row-parallel layer a share of its inputs, the sum of the ranks' outputs being the result. Weights
enter through :meth:`Linear.load` alone, part by part as checkpoints store them, which is where a
rank would take its share.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from .packed import Form, PackedWeight


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
        self._packed: PackedWeight | None = None
        self._parts: dict[str, slice] = {}
        start = 0
        for name, size in parts.items():
            self._parts[name] = slice(start, start + size)
            start += size
        shape = (self.out_features, in_features)
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

    def pack(self, form: Form) -> None:
        """Replace the weight by a packed form of it; nothing can be loaded any more."""
        self._packed = form(self.weight.data, None if self.bias is None else self.bias.data)
        self.weight = torch.nn.Parameter(self.weight.new_empty(0), requires_grad=False)

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self._parts)

    def destination(self, kind: str, part: str | None = None) -> torch.Tensor:
        """Where a checkpoint's tensor of one part, or of all, belongs: a contiguous view.

        Args:
            kind: "weight", ``[out, in]``, or "bias", ``[out]``.

        Raises:
            ValueError: there is no bias.
        """
        if kind == "bias":
            if self.bias is None:
                raise ValueError("this layer has no bias")
            target = self.bias.data
        else:
            target = self.weight.data
        return target if part is None else target[self._parts[part]]

    def load(self, kind: str, tensor: torch.Tensor, part: str | None = None) -> None:
        """Take a checkpoint's tensor, of one part or of all, into its :meth:`destination`.

        Raises:
            ValueError: the shape is another one, or there is no bias.
        """
        copy_checked(self.destination(kind, part), tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, in] -> [T, out]``."""
        if self._packed is not None:
            return self._packed(x)
        return F.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}"


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
    target.copy_(tensor)
