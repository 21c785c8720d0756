"""Linear layers, fused and laid out for tensor parallelism.

A column-parallel layer gives each rank a share of every one of its output parts, a row-parallel
layer a share of its inputs, the sum of the ranks' outputs being the result. Weights enter part by
part as checkpoints store them: :meth:`Linear.share` tells which of a stored tensor's rows or columns
are this rank's, and :meth:`Linear.destination` where they belong.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from specdec_kernels.projection import Weight

from ..distributed import SOLO, Group, Share, head_shares, rows_per_rank, share_of
from .adapters import LayerAdapters
from .packed import Form, Packable, PackedWeight

if TYPE_CHECKING:
    from .embedding import VocabEmbedding

_WITHOUT_WEIGHTS = contextvars.ContextVar("without_weights", default=False)


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """Linear layers made inside have no weight in memory until :meth:`Linear.allocate` or ``hold``."""
    token = _WITHOUT_WEIGHTS.set(True)
    try:
        yield
    finally:
        _WITHOUT_WEIGHTS.reset(token)


class Linear(Packable):
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
        self.adapters: LayerAdapters | None = None  #: what is added to its products; None: there is no room
        self._packed: PackedWeight | None = None
        self._parts: dict[str, slice] = {}
        start = 0
        for name, size in parts.items():
            self._parts[name] = slice(start, start + size)
            start += size
        shape = (self.out_features, in_features)
        weight = torch.empty(shape, dtype=dtype, device="meta" if _WITHOUT_WEIGHTS.get() else device)
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
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

    @property
    def allocated(self) -> bool:
        """Whether the weight has memory, in its own dtype or in another form."""
        return self._packed is not None or not self.weight.is_meta

    def allocate(self, device: torch.device) -> None:
        """Give the weight memory, if it has none."""
        if not self.allocated:
            weight = torch.empty_like(self.weight, device=device)
            self.weight = torch.nn.Parameter(weight, requires_grad=False)

    @property
    def form_bias(self) -> torch.Tensor | None:
        """The bias, for the form that takes the weight's place."""
        return None if self.bias is None else self.bias.data

    @property
    def operand(self) -> Weight:
        """What the fused products multiply by: the weight, or its words where it stays quantised."""
        words: Weight | None = getattr(self._packed, "words", None)
        return self.weight if words is None else words

    def _make_packed(self, form: Form) -> PackedWeight:
        return form(self.weight.data, self.form_bias)

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self._parts)

    def share(self, kind: str, part: str | None = None) -> Share | None:
        """What of a checkpoint's tensor is this rank's; None: all. Arguments as of :meth:`destination`."""
        return None

    def part_size(self, part: str) -> int:
        """Outputs of a part."""
        where = self._parts[part]
        return where.stop - where.start

    def shape(self, kind: str, part: str | None = None) -> tuple[int, ...]:
        """Of the whole tensor of a checkpoint, of which :meth:`destination` takes this rank's share."""
        size = self.out_features if part is None else self.part_size(part)
        shape = [size] if kind == "bias" else [size, self.in_features]
        if (share := self.share(kind, part)) is not None:
            shape[share.dim] = share.whole
        return tuple(shape)

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

    def destination_rows(self, part: str | None = None) -> int:
        """Outputs of one part, or of all."""
        return self.out_features if part is None else self._parts[part].stop - self._parts[part].start

    def load(self, kind: str, tensor: torch.Tensor, part: str | None = None) -> None:
        """Take a checkpoint's tensor, of one part or of all, into its :meth:`destination`.

        Raises:
            ValueError: the shape is another one, or there is no bias.
        """
        copy_checked(self.destination(kind, part), tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, in] -> [T, out]``."""
        y = F.linear(x, self.weight, self.bias) if self._packed is None else self._packed(x)
        return y if self.adapters is None else self.adapters.add(y, x)

    def delta(self, x: torch.Tensor) -> torch.Tensor | None:
        """What adapters add to the products of ``x``, ``[T, out]``, for whoever computes those itself."""
        return None if self.adapters is None else self.adapters.delta(x)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}"


class MergedColumnParallelLinear(Linear):
    """Several column-parallel layers of one input as one product.

    Args:
        parts: name -> number of outputs of all ranks.
        shares: of each part; None: equal ones.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device,
        group: Group = SOLO,
        shares: Mapping[str, Share] | None = None,
    ) -> None:
        if shares is None:
            shares = {
                name: share_of(size, group.rank, group.size, what=f"outputs of {name}")
                for name, size in parts.items()
            }
        own = {name: share.size for name, share in shares.items()}
        super().__init__(in_features, own, bias=bias, dtype=dtype, device=device)
        self._shares = None if group.size == 1 else shares

    def share(self, kind: str, part: str | None = None) -> Share | None:
        return None if self._shares is None else self._shares[part or next(iter(self._shares))]


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


class VocabParallelLinear(MergedColumnParallelLinear):
    """An output layer: each rank makes the logits of some tokens, and all of them get those of all.

    Each rank has as many rows; those behind the vocabulary's end are zero.
    """

    def __init__(
        self,
        in_features: int,
        vocab_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: Group = SOLO,
    ) -> None:
        rows = rows_per_rank(vocab_size, group.size)
        start = min(group.rank * rows, vocab_size)
        own = Share(0, start, min(rows, vocab_size - start), vocab_size)
        super().__init__(
            in_features, {"out": vocab_size}, dtype=dtype, device=device, group=group, shares={"out": own}
        )
        self._group = group
        self._vocab_size = vocab_size
        if own.size != rows:
            self.out_features = rows
            self.weight = torch.nn.Parameter(self.weight.new_zeros(rows, in_features), requires_grad=False)

    def tie(self, embedding: VocabEmbedding) -> None:
        """Take the rows of an embedding for weights."""
        self.weight = (
            torch.nn.Parameter(embedding.rows, requires_grad=False)
            if embedding.whole and self._group.size > 1
            else embedding.weight
        )

    def destination(self, kind: str, part: str | None = None) -> torch.Tensor:
        return super().destination(kind, part or "out")  # not what is behind the vocabulary's end

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """This rank's columns ``[T, V / ranks]`` to those of all, ``[T, V]``."""
        if self._group.size == 1:
            return logits
        return self._group.all_gather(logits)[:, : self._vocab_size].contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, in] -> [T, V]``."""
        return self.gather(super().forward(x))


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
        group: Group = SOLO,
    ) -> None:
        queries, kv = (
            Share(0, heads.start * head_dim, heads.size * head_dim, heads.whole * head_dim)
            for heads in head_shares(num_heads, num_kv_heads, group.rank, group.size)
        )
        shares = {"q": queries, "k": kv, "v": kv}
        parts = {name: share.whole for name, share in shares.items()}
        super().__init__(
            hidden_size, parts, bias=bias, dtype=dtype, device=device, group=group, shares=shares
        )


class RowParallelLinear(Linear):
    """A layer that is sharded by its inputs. The bias is rank 0's: the other ranks' is zero."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device,
        group: Group = SOLO,
    ) -> None:
        own = share_of(in_features, group.rank, group.size, dim=1, what="inputs")
        super().__init__(own.size, {"out": out_features}, bias=bias, dtype=dtype, device=device)
        self.group = group
        self._own = own
        if self.bias is not None and group.rank:
            self.bias.data.zero_()

    def share(self, kind: str, part: str | None = None) -> Share | None:
        if self.group.size == 1:
            return None
        if kind == "bias":
            return Share(0, 0, 0 if self.group.rank else self.out_features, self.out_features)
        return self._own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, in / ranks] -> [T, out]``."""
        y = super().forward(x)
        return self.group.all_reduce(y) if self.group.size > 1 else y


def copy_checked(target: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy, converting the dtype; ValueError on a shape that differs (``copy_`` would broadcast it)."""
    if target.shape != tensor.shape:
        raise ValueError(f"expected shape {list(target.shape)}, got {list(tensor.shape)}")
    target.copy_(tensor)
