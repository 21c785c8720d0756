"""What adapters add to the products of linear layers, and which adapter each token has.

Every layer keeps a fixed number of adapters in *slots*. Which slot a token uses is told once a forward, by
:class:`TokenAdapters`, which all layers of a model share; a layer itself knows rows only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.nn.functional as F
from specdec_kernels.lora import lora_delta

from .packed import PackedWeight, dense_form

#: Of one part of a layer: ``A [r, in]`` and ``B [out, r]``, its scale in it, in the model's dtype.
Factors = tuple[torch.Tensor, torch.Tensor]


class TokenAdapters:
    """The slot of each token of the forward under way."""

    def __init__(self) -> None:
        self.slots: torch.Tensor | None = None  #: ``[T]`` int64, -1: no adapter; None: no token has one
        self.groups: list[tuple[int, torch.Tensor]] = []  #: on a CPU: a slot, and the tokens that use it

    @contextmanager
    def of(self, slots: torch.Tensor | None) -> Iterator[None]:
        """Inside, forwards are of tokens with these slots."""
        self.slots = slots
        if slots is not None and slots.device.type == "cpu":
            used = [slot for slot in slots.unique().tolist() if slot >= 0]
            self.groups = [(slot, (slots == slot).nonzero()[:, 0]) for slot in used]
        try:
            yield
        finally:
            self.slots, self.groups = None, []


class LayerAdapters(Protocol):
    """The adapters of one linear layer."""

    @property
    def num_bytes(self) -> int: ...

    def put(self, slot: int, factors: Mapping[str, Factors]) -> None:
        """Have ``slot`` hold an adapter's factors, by the layer's parts; other parts are not adapted."""
        ...

    def delta(self, x: torch.Tensor) -> torch.Tensor | None:
        """What is to be added to the products of ``x``: ``[T, in] -> [T, out]``; None: nothing."""
        ...

    def add(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``y`` with what is to be added to it, the products of ``x``; may change it."""
        ...


class StackedAdapters:
    """Slots in tensors that stay where they are, for kernels that a CUDA graph may hold."""

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        *,
        slots: int,
        rank: int,
        tokens: TokenAdapters,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """
        Args:
            parts: name -> number of outputs, in the order of the layer's outputs.
            rank: the most that an adapter may have.
        """
        self._tokens = tokens
        self._parts = dict(parts)
        self._rank = rank
        self._a = torch.zeros(slots, len(parts) * rank, in_features, dtype=dtype, device=device)
        self._b = torch.zeros(slots, sum(parts.values()), rank, dtype=dtype, device=device)

    @property
    def num_bytes(self) -> int:
        return self._a.nbytes + self._b.nbytes

    def put(self, slot: int, factors: Mapping[str, Factors]) -> None:
        self._a[slot].zero_()
        self._b[slot].zero_()
        start = 0
        for index, (name, size) in enumerate(self._parts.items()):
            if name in factors:
                a, b = factors[name]
                first, rank = index * self._rank, len(a)
                self._a[slot, first : first + rank].copy_(a)
                self._b[slot, start : start + size, :rank].copy_(b)
            start += size

    def delta(self, x: torch.Tensor) -> torch.Tensor | None:
        if self._tokens.slots is None:
            return None
        return lora_delta(x.contiguous(), self._a, self._b, self._tokens.slots, tuple(self._parts.values()))

    def add(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        delta = self.delta(x)
        return y if delta is None else y + delta


class PackedAdapters:
    """Slots of packed factors, for a CPU: only tokens that have an adapter are computed."""

    def __init__(
        self, parts: Mapping[str, int], *, slots: int, tokens: TokenAdapters, dtype: torch.dtype, exact: bool
    ) -> None:
        """``exact``: a token's bits do not depend on those beside it, where the kernels can do it."""
        self._tokens = tokens
        self._form = dense_form(dtype, exact=exact) or _Plain
        self._where: dict[str, slice] = {}
        start = 0
        for name, size in parts.items():
            self._where[name] = slice(start, start + size)
            start += size
        self._out_features = start
        self._slots: list[dict[str, tuple[PackedWeight, PackedWeight]]] = [{} for _ in range(slots)]

    @property
    def num_bytes(self) -> int:
        return sum(a.num_bytes + b.num_bytes for slot in self._slots for a, b in slot.values())

    def put(self, slot: int, factors: Mapping[str, Factors]) -> None:
        self._slots[slot] = {
            name: (self._form(a, None), self._form(b, None)) for name, (a, b) in factors.items()
        }

    def delta(self, x: torch.Tensor) -> torch.Tensor | None:
        if not self._tokens.groups:
            return None
        return self.add(x.new_zeros(x.shape[0], self._out_features), x)

    def add(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for slot, rows in self._tokens.groups:
            own = x[rows]
            for part, (a, b) in self._slots[slot].items():
                where = self._where[part]
                y[rows, where] += b(a(own))
        return y


class _Plain:
    """Factors as they are."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.num_bytes = weight.nbytes
        self._weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)
