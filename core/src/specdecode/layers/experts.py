"""Linear layers of experts: one a group of rows, all stacked in one tensor."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from specdec_kernels.experts import Groups, PackedExperts, grouped_linear, pack_experts

from ..contract import ConfigError
from ..distributed import Share
from .packed import Form, NativeWeight, Packable, PackedWeight


class ExpertsLinear(Packable):
    """``x @ W[e]^T`` for rows of each expert ``e``, whose outputs are named parts, one behind the other.

    Args:
        parts: name -> number of outputs, in the order of the outputs; of one part the name is not asked for.
        shares: of each part, of its outputs or of its inputs, what this rank has; None: all.
    """

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        parts: Mapping[str, int],
        *,
        dtype: torch.dtype,
        device: torch.device,
        shares: Mapping[str, Share] | None = None,
    ) -> None:
        super().__init__()
        self._whole = {name: (size, in_features) for name, size in parts.items()}
        self._shares = shares
        for name, share in (shares or {}).items():
            if share.dim == 0:
                parts = {**parts, name: share.size}
            else:
                in_features = share.size
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
        """Where a checkpoint's weights of one part of one expert, or of all, belong: a contiguous view.

        Raises:
            ConfigError: they are of all experts, of which ranks have a share each.
        """
        weight = self.weight.data
        if expert is not None:
            return weight[expert] if part is None else weight[expert, self._parts[part]]
        if self._shares is not None:
            raise ConfigError(
                "tensor_parallel_size works with mixtures whose checkpoint has a tensor for each expert, and "
                "this one has all experts in one: save it as its family is published, or use one device"
            )
        return weight

    def share(self, part: str) -> Share | None:
        """What of an expert's tensor is this rank's; None: all."""
        return None if self._shares is None else self._shares[part]

    def shape(self, expert: int | None = None, part: str | None = None) -> tuple[int, ...]:
        """Of that tensor, packed or not; of all ranks."""
        sizes = [size for name, size in self._whole.items() if part in (None, name)]
        shape = (sum(outputs for outputs, _ in sizes), sizes[0][1])
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
