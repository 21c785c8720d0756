"""Linear layers of experts: one a group of rows, all stacked in one tensor."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from specdec_kernels.experts import Groups, PackedExperts, grouped_linear, pack_experts

from .packed import Form, NativeWeight, Packable, PackedWeight


class ExpertsLinear(Packable):
    """``x @ W[e]^T`` for rows of each expert ``e``, whose outputs are named parts, one behind the other.

    Args:
        parts: name -> number of outputs, in the order of the outputs; of one part the name is not asked for.
    """

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        parts: Mapping[str, int],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.num_experts, self.in_features, self.out_features = num_experts, in_features, sum(parts.values())
        self._parts: dict[str, slice] = {}
        start = 0
        for name, size in parts.items():
            self._parts[name] = slice(start, start + size)
            start += size
        shape = (num_experts, self.out_features, in_features)
        self.weight = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
        self._packed: PackedExperts | list[PackedWeight] | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self._parts)

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights in memory."""
        if self._packed is None:
            return self.weight.nbytes
        if isinstance(self._packed, PackedExperts):
            return self._packed.num_bytes
        return sum(own.num_bytes for own in self._packed)

    def destination(self, expert: int | None = None, part: str | None = None) -> torch.Tensor:
        """Where a checkpoint's weights of one part of one expert, or of all, belong: a contiguous view."""
        weight = self.weight.data
        if expert is None:
            return weight
        return weight[expert] if part is None else weight[expert, self._parts[part]]

    def shape(self, expert: int | None = None, part: str | None = None) -> tuple[int, ...]:
        """Of that tensor, packed or not."""
        rows = self._parts[part] if part is not None else slice(0, self.out_features)
        shape = (rows.stop - rows.start, self.in_features)
        return shape if expert is not None else (self.num_experts, *shape)

    def _make_packed(self, form: Form) -> PackedExperts | list[PackedWeight]:
        weight = self.weight.data
        return pack_experts(weight) if form is NativeWeight else [form(own, None) for own in weight]

    def forward(self, x: torch.Tensor, groups: Groups) -> torch.Tensor:
        """``[P, in] -> [P, out]``, rows in the order of ``groups``."""
        if not isinstance(self._packed, list):
            return grouped_linear(x, self.weight if self._packed is None else self._packed, groups)
        y = x.new_empty(x.shape[0], self.out_features)
        for expert, rows in groups.touched():
            y[rows] = self._packed[expert](x[rows])
        return y

    def extra_repr(self) -> str:
        return f"{self.num_experts} experts, {self.in_features} -> {self.out_features}"
