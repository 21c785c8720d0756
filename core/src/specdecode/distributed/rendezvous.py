"""Ranks find each other: a store at rank 0, and a process group of their own.

The group is no default group of ``torch.distributed``: a process may hold several engines, and may use that
for something else.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .group import CollectiveGroup, Told
from .peers import share_memory
from .release import DeviceRelease, NoRelease, Release

Found = TypeVar("Found")

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
    store: dist.Store, rank: int, ranks: int, *, device: torch.device, told: Told, check: Callable[[], None]
) -> tuple[CollectiveGroup, Release]:
    """This rank's end of a group of ``ranks``, and what frees it when another rank has ended.

    Waits for all ranks; what ``check`` raises meanwhile ends that. A GPU, ``device``, also becomes the
    current one.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Whoever waits in here for a rank that has ended may wait for ever.
    return _from_a_thread(lambda: _join(store, rank, ranks, device, told), check)


def _join(
    store: dist.Store, rank: int, ranks: int, device: torch.device, told: Told
) -> tuple[CollectiveGroup, Release]:
    timeout = timedelta(seconds=TIMEOUT)
    if device.type != "cuda":
        group = CollectiveGroup(dist.ProcessGroupGloo(store, rank, ranks, timeout), told, device)
        group.least(0)
        return group, NoRelease()
    torch.cuda.set_device(device)  # each thread has its own
    # Rank 0 watches over the processes itself; torch's watches would end this one.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    backend: Any = dist.ProcessGroupNCCL(store, rank, ranks, options)
    group = CollectiveGroup(backend, told, device)
    group.least(0)  # connects, which no capture may
    group.peers = share_memory(group, backend, store, device)
    return group, DeviceRelease(group, backend, device)


def _from_a_thread(work: Callable[[], Found], check: Callable[[], None]) -> Found:
    """What ``work`` gives, in a thread that is left behind when ``check`` raises."""
    future: Future[Found] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="specdecode-join", daemon=True).start()
    while not wait([future], timeout=_LOOK).done:
        check()
    return future.result()
