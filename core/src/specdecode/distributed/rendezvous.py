"""Ranks find each other: a store on this machine, and a process group of their own.

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

from ..contract import ConfigError
from .group import CollectiveGroup, Told

#: Seconds that a collective waits for the slowest rank: kernels are compiled and weights read in between.
TIMEOUT = 1800.0
HOST = "127.0.0.1"
_LOOK = 0.02


def open_store(ranks: int) -> dist.TCPStore:
    """Rank 0's store, on a port that is free."""
    return dist.TCPStore(
        HOST, 0, ranks, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=TIMEOUT)
    )


def wait_for_all(store: dist.TCPStore, ranks: int, check: Callable[[], None]) -> None:
    """Wait until all other ranks are about to :func:`join`; what ``check`` raises ends that."""
    while not store.check([_here(rank) for rank in range(1, ranks)]):
        check()
        time.sleep(_LOOK)


def _here(rank: int) -> str:
    return f"rank {rank} is here"


def join(
    rank: int,
    ranks: int,
    port: int,
    *,
    device: torch.device,
    told: Told,
    store: dist.Store | None = None,
) -> tuple[CollectiveGroup, Callable[[], None]]:
    """This rank's end of a group of ``ranks``, and what frees it when another rank has ended.

    Waits for all ranks. On a GPU it also makes the rank's device the current one.
    """
    if store is None:
        store = dist.TCPStore(HOST, port, ranks, is_master=False, timeout=timedelta(seconds=TIMEOUT))
        store.set(_here(rank), "")
    timeout = timedelta(seconds=TIMEOUT)
    if device.type == "cuda":
        torch.cuda.set_device(rank)
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


def check_devices(ranks: int, device: str) -> None:
    """Raise ConfigError where this machine has not a device for each rank."""
    kind = torch.device(device)
    if kind.index is not None:
        raise ConfigError(
            f"tensor_parallel_size={ranks} takes the first {ranks} devices, got device={device!r}: leave the "
            "number out, or choose among GPUs by CUDA_VISIBLE_DEVICES"
        )
    if kind.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"tensor_parallel_size={ranks} works on CPUs and CUDA devices, got device={device!r}"
        )
    there = torch.cuda.device_count() if kind.type == "cuda" else ranks
    if there < ranks:
        raise ConfigError(
            f"tensor_parallel_size={ranks} wants as many GPUs, and {there} can be seen here: "
            f"use at most {there}, or device='cpu'"
        )
