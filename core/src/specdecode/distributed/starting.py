"""Starts the ranks of an engine: this process is rank 0."""

from __future__ import annotations

from typing import Any

import torch

from .lockstep import Alone, Leading, Ranks
from .processes import Workers
from .rendezvous import join, open_store, wait_for_all
from .worker import Setup


def start_ranks(args: Any, ranks: int, device: torch.device) -> Ranks:
    """The other ranks' processes, each about to make its engine of ``args``; nobody for one rank.

    Raises:
        WorkerDied: a process ended before all had met.
    """
    if ranks == 1:
        return Alone()
    store = open_store(ranks)
    workers = Workers.start(
        [
            Setup(
                args=args,
                rank=rank,
                ranks=ranks,
                port=store.port,
                device=device.type,
                threads=torch.get_num_threads(),
            )
            for rank in range(1, ranks)
        ]
    )
    try:
        wait_for_all(store, ranks, workers.check)
        group, abort = join(0, ranks, store.port, device=device, told=workers.sender, store=store)
    except BaseException as error:
        raise workers.lost(error) from error
    workers.on_loss(abort)
    return Leading(group, workers)
