"""Starts the ranks of an engine: this process is rank 0."""

from __future__ import annotations

from typing import Any

import torch

from . import peers
from .executors import Executor
from .lockstep import Alone, Leading, Ranks
from .processes import Workers
from .rendezvous import join, open_store, wait_for_all
from .worker import Setup


def start_ranks(args: Any, ranks: int, device: torch.device, executor: Executor) -> Ranks:
    """The other ranks' processes, each about to make its engine of ``args``; nobody for one rank.

    Raises:
        ConfigError: the environment chooses what there is not.
        WorkerDied: a process ended before all had met.
    """
    if ranks == 1:
        return Alone()
    peers.wanted()  # says what is wrong before a process is started
    host = executor.host
    store = open_store(host, ranks)
    started = executor.start(ranks)
    setup = [
        Setup(
            args=args,
            rank=worker.rank,
            ranks=ranks,
            host=host,
            port=store.port,
            device=device.type,
            index=executor.device_of(worker.rank),
            threads=torch.get_num_threads(),
        )
        for worker in started
    ]
    workers = Workers(started, setup)
    index = executor.device_of(0)
    try:
        wait_for_all(store, ranks, workers.check)
        group, release = join(
            store,
            0,
            ranks,
            device=torch.device(device.type, index),
            told=workers.sender,
            check=workers.check,
        )
    except BaseException as error:
        raise workers.lost(error) from error
    workers.on_loss(release)
    return Leading(group, workers)
