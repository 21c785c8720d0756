"""Small sums over the ranks of one host, in kernels that write into the other ranks' memory.

The memory is torch's symmetric memory, without multicast; the kernels are :mod:`specdec_kernels.ranks`. Every
rank adds in the order of the ranks.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import re
import socket
import time
import zlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from specdec_kernels.ranks import Mail, sum_over_ranks

from ..contract import ConfigError

logger = logging.getLogger(__name__)

#: In the environment: "nccl" has NCCL do all sums; "auto", the default, uses this where it works.
SWITCH = "SPECDECODE_ALL_REDUCE"
#: Bytes that a rank sends for a sum at most: above, two steps move fewer.
LIMIT = 1 << 22
#: Of a word.
_WORD = 8
#: Seconds that the ranks wait for each other when they first meet, and for the first sums.
_PATIENCE = 30.0

#: In the keys of torch's exchanges.
_NUMBER = re.compile(r"(?<=CUDASymmetricMemory/)\d+")

_groups = itertools.count()


def wanted() -> bool:
    """Whether the environment leaves the choice to us.

    Raises:
        ConfigError: it says something else.
    """
    choice = os.environ.get(SWITCH, "auto")
    if choice not in ("auto", "nccl"):
        raise ConfigError(f"{SWITCH} in the environment must be 'auto' or 'nccl', got {choice!r}")
    return choice == "auto"


def host_number() -> int:
    """The same on all ranks of a host, and on no other's."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = f"{socket.gethostname()} {boot.read_text() if boot.is_file() else ''}"
    return zlib.crc32(name.encode())


def _new_name() -> Any:
    """Of a group of ranks: torch knows it by that in this process, and in no other."""
    return f"specdecode-{next(_groups)}"


class PeerMemory:
    """Memory of each rank into which all write.

    Args:
        backend: ``torch.distributed.ProcessGroupNCCL`` of the ranks that share it.
        store: theirs.
    """

    #: Of what is summed.
    DTYPES = (torch.float32, torch.bfloat16, torch.float16)

    def __init__(self, backend: Any, store: dist.Store, device: torch.device) -> None:
        """Waits for all ranks.

        Raises:
            Exception: torch, the driver or the machine has no such thing; not always on all ranks alike.
        """
        # Nothing here uses multicast, and some hosts suffer from it.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        import specdec_kernels.ranks.gpu  # noqa: F401  raises without Triton
        from torch._C._autograd import DeviceType
        from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory

        if _SymmetricMemory.has_multicast_support(DeviceType.CUDA, device.index):
            raise RuntimeError("torch would set up multicast: set TORCH_SYMM_MEM_DISABLE_MULTICAST=1")
        rank, ranks = backend.rank(), backend.size()
        self._name = _new_name()
        self._store = RanksStore(store)  # torch calls it as long as it lives
        self._group = dist.ProcessGroup(self._store, rank, ranks)
        self._group._register_backend(device, dist.ProcessGroup.BackendType.NCCL, backend)
        self._group._set_group_name(self._name)  # which is kept by the backends
        _register_process_group(self._name, self._group)
        _SymmetricMemory.set_group_info(self._name, rank, ranks, self._store)
        words = LIMIT // _WORD // (ranks - 1)
        shape = Mail.shape(ranks, words)
        strides = torch.empty(shape, device="meta").stride()
        memory = _SymmetricMemory.empty_strided_p2p(shape, strides, torch.int64, device, self._name)
        memory.zero_()
        torch.cuda.synchronize(device)  # before any other rank can write
        self._handle = _SymmetricMemory.rendezvous(memory, self._name)
        self._memory = memory
        addresses = [self._handle.get_buffer(other, shape, torch.int64).data_ptr() for other in range(ranks)]
        #: through which products are summed.
        self.mail = Mail.of(addresses, rank, words, device)
        self._closed = False
        # For call_off, when it may be too late to allocate.
        self._stream = torch.cuda.Stream(device)
        self._one = torch.ones(1, dtype=torch.int64).pin_memory()

    def takes(self, x: torch.Tensor) -> bool:
        """Whether :meth:`sum` takes ``x``; by shape and dtype alone, so that all ranks find the same."""
        width = x.shape[-1] if x.ndim else 0
        return x.dtype in self.DTYPES and width > 0 and self.mail.takes(x.numel() // width, width, x.dtype)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' ``x``, of its shape and dtype; in float32 and rounded once."""
        return sum_over_ranks(x.contiguous(), self.mail)

    def call_off(self) -> None:
        """Have kernels go on that wait for a rank which has ended, and later ones wait for nobody."""
        with torch.cuda.stream(self._stream):
            self.mail.stop.copy_(self._one, non_blocking=True)

    def close(self) -> None:
        """Let torch forget the ranks; no sum comes any more. May be called twice."""
        from torch._C._distributed_c10d import _unregister_process_group

        if not self._closed:
            self._closed = True
            _unregister_process_group(self._name)

    def leak(self) -> None:
        """Never give the memory back: after a failure of the device that would end the process."""
        for held in (self._memory, self._handle):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


class RanksStore(dist.Store):
    """A store for torch's rendezvous, which waits for no rank much longer than they take to come.

    Torch numbers its exchanges through a process's life; ranks that made other engines before count from
    elsewhere. Here all count from 0.
    """

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store
        self._first: int | None = None

    def _key(self, key: str) -> str:
        return _NUMBER.sub(self._renumbered, key)

    def _renumbered(self, found: re.Match[str]) -> str:
        number = int(found.group())
        if self._first is None:
            self._first = number
        return str(number - self._first)

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(self._key(key))

    def add(self, key: str, value: int) -> int:
        return self._store.add(self._key(key), value)

    def check(self, keys: list[str]) -> bool:
        return self._store.check([self._key(key) for key in keys])

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=_PATIENCE)) -> None:
        self._store.wait([self._key(key) for key in keys], min(timeout, timedelta(seconds=_PATIENCE)))


def share_memory(group: Any, backend: Any, store: dist.Store, device: torch.device) -> PeerMemory | None:
    """Memory that all ranks of ``group`` share, if it works on each of them; a line for the log tells.

    Args:
        group: a :class:`~.group.CollectiveGroup` of ``backend``, by which the ranks agree.
    """
    if not group.least(wanted()):
        return None
    number = host_number()
    # One least each, whatever happens here: the ranks stay in step.
    if not group.least(group.least(number) == number):
        _without("the ranks are on several hosts")
        return None
    peers, why = None, "another rank cannot"
    try:
        peers = PeerMemory(backend, dist.PrefixStore("peers", store), device)
    except Exception as error:
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if not group.least(peers is not None):
        _without(why)
        return None
    assert peers is not None
    if not group.least(_right(peers, group, device)):
        peers.close()
        _without("the sums of some rank are wrong, or take too long")
        return None
    logger.info("small sums over the ranks are made in memory that they share")
    return peers


def _without(why: str) -> None:
    logger.info("sums over the ranks are NCCL's alone: %s", why)


def _right(peers: PeerMemory, group: Any, device: torch.device) -> bool:
    """Whether sums of known numbers are to the bit what they are by the group itself."""
    generator = torch.Generator(device).manual_seed(1 + group.rank)
    shapes = [(1, 64), (3, 1000), (8, 4096)]
    terms = [
        torch.randn(shape, generator=generator, device=device).exp().sub(1).to(dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for shape in shapes
    ]
    expected = [group.all_reduce(term) for term in terms]
    done = torch.cuda.Event()
    torch.cuda.synchronize(device)
    try:
        found = [peers.sum(term) for term in terms for _ in range(2)]  # the second finds memory in use
        done.record()
    except Exception:
        logger.debug("a sum in shared memory raised", exc_info=True)
        return False
    deadline = time.monotonic() + _PATIENCE
    while not done.query():
        if time.monotonic() > deadline:
            peers.call_off()
            return False
        time.sleep(0.01)
    return all(torch.equal(one, other) for one, other in zip(found[::2], expected, strict=True)) and all(
        torch.equal(one, other) for one, other in zip(found[1::2], expected, strict=True)
    )
