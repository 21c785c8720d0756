"""The ranks that share a model, and what they say to each other in tensors.

All ranks call the same collectives in the same order. What comes back is the same on each, to the bit: sums
are made in the order of the ranks, whatever the size of the tensor, so that the result of a token does not
depend on the tokens beside it either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from specdec_kernels.ranks import Mail

from .errors import WorkerDied

if TYPE_CHECKING:
    from .peers import PeerMemory

Value = TypeVar("Value")


class Group(Protocol):
    """A rank among ``size``, and its collectives. All but ``agree`` may be captured in a CUDA graph."""

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' ``x``, of its shape and dtype; summed in float32 and rounded once."""

    def terms(self, x: torch.Tensor) -> torch.Tensor:
        """``[n, *x.shape]``, whose sum in float32 along dimension 0 is that of :meth:`all_reduce`.

        For kernels that add them up on the way: of small tensors all ranks' ``x``, else their sum alone.
        """

    def mail(self, like: torch.Tensor) -> Mail | None:
        """By which kernels sum ``[T, H]`` like it themselves, to the same bits; None: they cannot."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' ``x``, ``[T, n]``, side by side in the order of the ranks: ``[T, size * n]``."""

    def broadcast(self, x: torch.Tensor) -> None:
        """Overwrite ``x`` by rank 0's."""

    def least(self, value: int) -> int:
        """The smallest of all ranks' values; waits for all of them."""

    def agree(self, value: Value) -> Value:
        """Rank 0's ``value``: for what the ranks would not find alike, such as a time. Host only."""


class Solo:
    """The group of a model that is not shared."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def terms(self, x: torch.Tensor) -> torch.Tensor:
        return x[None]

    def mail(self, like: torch.Tensor) -> Mail | None:
        return None

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def broadcast(self, x: torch.Tensor) -> None:
        return None

    def least(self, value: int) -> int:
        return value

    def agree(self, value: Value) -> Value:
        return value


SOLO = Solo()


class Told(Protocol):
    """How rank 0 tells the others a value of the host."""

    def agree(self, value: Value) -> Value: ...


class CollectiveGroup:
    """Ranks by a process group of torch: NCCL on GPUs, gloo on CPUs; small sums in memory they share, if any.

    Args:
        backend: ``torch.distributed.ProcessGroupNCCL`` or ``ProcessGroupGloo``.
        told: of the host's values.
        device: of the tensors.
    """

    #: Elements of a tensor up to which a sum is gathered whole by every rank; larger ones are summed in
    #: shares, which moves fewer bytes and takes two steps.
    GATHERED = 1 << 19

    def __init__(self, backend: Any, told: Told, device: torch.device) -> None:
        self.rank: int = backend.rank()
        self.size: int = backend.size()
        self._backend = backend
        self._told = told
        self._device = device
        self.peers: PeerMemory | None = None  #: in which small sums are made
        self.broken = False  #: a rank has ended: collectives raise

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        terms = self.terms(x)
        return terms[0] if len(terms) == 1 else _sum(terms, x.dtype)

    def terms(self, x: torch.Tensor) -> torch.Tensor:
        self._check()
        if self.peers is not None and self.peers.takes(x):
            return self.peers.sum(x)[None]
        if x.numel() <= self.GATHERED or x.device.type != "cuda":  # of gloo not every one has shares
            return self._gather(x.contiguous()).view(self.size, *x.shape)
        return self._all_reduce_in_shares(x)[None]

    def mail(self, like: torch.Tensor) -> Mail | None:
        self._check()
        return self.peers.mail if self.peers is not None and self.peers.takes(like) else None

    def _all_reduce_in_shares(self, x: torch.Tensor) -> torch.Tensor:
        """Each rank sums one share of ``x``, and all gather the sums; the same bits as at once."""
        share = -(-x.numel() // self.size)
        flat = torch.nn.functional.pad(x.reshape(-1), (0, share * self.size - x.numel()))
        received = torch.empty_like(flat)
        _done(self._backend.alltoall_base(received, flat, [], [], _all_to_all_options()))
        summed = _sum(received.view(self.size, share), x.dtype)
        return self._gather(summed)[: x.numel()].view(x.shape)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        parts = self._gather(x.contiguous()).view(self.size, *x.shape)
        return parts.movedim(0, -2).flatten(-2)

    def broadcast(self, x: torch.Tensor) -> None:
        self._check()
        options = torch.distributed.BroadcastOptions()
        options.rootRank = 0
        staged = x.contiguous()
        _done(self._backend.broadcast([staged], _on_this_stream(options)))
        if staged is not x:
            x.copy_(staged)

    def least(self, value: int) -> int:
        mine = torch.tensor([value], dtype=torch.int64, device=self._device)
        return int(self._gather(mine).min())

    def agree(self, value: Value) -> Value:
        return self._told.agree(value)

    def _check(self) -> None:
        """A backend that is being aborted would keep the caller until that is done, which may be never."""
        if self.broken:
            raise WorkerDied("another rank has ended")

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        """``[size * numel]``: all ranks' elements one after the other."""
        self._check()
        flat = x.reshape(-1)
        out = torch.empty(self.size * flat.numel(), dtype=x.dtype, device=x.device)
        if flat.numel():
            _done(self._backend._allgather_base(out, flat, _gather_options()))
        return out


def _done(work: Any) -> None:
    """Have the stream wait for a collective, where it did not run there."""
    if work is not None:
        work.wait()


def _sum(parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Sum ``[ranks, ...]`` in the order of the ranks."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(dtype)


def _on_this_stream(options: Any) -> Any:
    """Enqueue on the stream of the caller, not beside it: what comes next needs the result anyway."""
    if hasattr(options, "asyncOp"):
        options.asyncOp = False
    return options


def _gather_options() -> Any:
    return _on_this_stream(torch._C._distributed_c10d.AllgatherOptions())


def _all_to_all_options() -> Any:
    return _on_this_stream(torch.distributed.AllToAllOptions())
