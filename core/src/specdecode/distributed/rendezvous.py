"""Ranks find each other: a store at rank 0, and a process group of their own.

The group is no default group of ``torch.distributed``: a process may hold several engines, and may use that
for something else.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .group import CollectiveGroup, Told

#: Seconds that a collective waits for the slowest rank: kernels are compiled and weights read in between.
TIMEOUT = 1800.0
_LOOK = 0.02


def open_store(host: str, ranks: int) -> dist.TCPStore:
    """Rank 0's store at its own address ``host``, on a port that is free."""
    return dist.TCPStore(
        host, 0, ranks, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=TIMEOUT)
    )


def reach_store(host: str, port: int, rank: int, ranks: int) -> dist.TCPStore:
    """Rank 0's store from another rank, which is there from now on."""
    store = dist.TCPStore(host, port, ranks, is_master=False, timeout=timedelta(seconds=TIMEOUT))
    store.set(_here(rank), "")
    return store


def wait_for_all(store: dist.TCPStore, ranks: int, check: Callable[[], None]) -> None:
    """Wait until all other ranks are about to :func:`join`; what ``check`` raises ends that."""
    while not store.check([_here(rank) for rank in range(1, ranks)]):
        check()
        time.sleep(_LOOK)


def _here(rank: int) -> str:
    return f"rank {rank} is here"


def join(
    store: dist.Store, rank: int, ranks: int, *, device: torch.device, told: Told
) -> tuple[CollectiveGroup, Callable[[], None]]:
    """This rank's end of a group of ``ranks``, and what frees it when another rank has ended.

    Waits for all ranks. A GPU, ``device``, also becomes the current one.
    """
    timeout = timedelta(seconds=TIMEOUT)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # Rank 0 watches over the processes itself; torch's watch would end this one.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        backend: Any = dist.ProcessGroupNCCL(store, rank, ranks, options)
    else:
        backend = dist.ProcessGroupGloo(store, rank, ranks, timeout)
    group = CollectiveGroup(backend, told, device)
    group.least(0)  # connects, which no capture may
    return group, backend.abort if device.type == "cuda" else _nothing


def _nothing() -> None:
    """gloo notices by itself: the connection ends."""
