"""Tensor parallelism in one process: a thread for each rank, on the same collectives, in milliseconds.

What processes add (their start, their end, other seeds of hashing) is not there; all else is: gloo, messages
that are pickled, an engine, a scheduler and a proposer for each rank.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import Pipe
from typing import Any

import torch
import torch.distributed as dist

from ..api import assemble as assembling
from ..api.engine import LLMEngine
from ..contract import ConfigError
from ..distributed.channel import Receiver, Sender
from ..distributed.errors import WorkerDied
from ..distributed.group import CollectiveGroup
from ..distributed.lockstep import Alone, Following, Leading, Ranks
from ..distributed.worker import follow
from ..plugins import PluginManager

#: Seconds that a rank waits for another: a test that hangs fails.
PATIENCE = 20.0


class Threads:
    """The other ranks as threads: as :class:`~specdecode.distributed.processes.Workers`.

    Attributes:
        engines: of the other ranks, once they are made.
    """

    pids: Sequence[int] = ()

    def __init__(self, args: Any, ranks: int, managers: Callable[[], PluginManager | None]) -> None:
        self.store = dist.HashStore()
        self.error: WorkerDied | None = None
        self.engines: dict[int, LLMEngine] = {}
        pipes = [Pipe(duplex=False) for _ in range(1, ranks)]
        self.sender = Sender([sending for _, sending in pipes])
        self._pipes = pipes
        self._threads = [
            threading.Thread(
                target=self._serve,
                args=(args, rank, ranks, receiving, managers()),
                name=f"rank {rank}",
                daemon=True,
            )
            for rank, (receiving, _) in enumerate(pipes, 1)
        ]
        for thread in self._threads:
            thread.start()

    def group(self, rank: int, ranks: int, told: Any) -> CollectiveGroup:
        backend = dist.ProcessGroupGloo(self.store, rank, ranks, timedelta(seconds=PATIENCE))
        return CollectiveGroup(backend, told, torch.device("cpu"))

    def _serve(self, args: Any, rank: int, ranks: int, calls: Any, manager: PluginManager | None) -> None:
        receiver = Receiver(calls)
        try:
            following = Following(self.group(rank, ranks, receiver), receiver)
            engine = LLMEngine.from_parts(args, assembling.assemble(args, manager, following))
            self.engines[rank] = engine
            follow(engine, receiver)
        except EOFError:  # rank 0 is gone
            return
        except Exception as error:
            self.error = WorkerDied(f"rank {rank} raised {type(error).__name__}: {error}")
            self.error.__cause__ = error

    def caught_up(self, rank: int) -> LLMEngine:
        """A rank's engine, once it has done all that it was told."""
        self._errand(rank, lambda engine: None)()
        return self.engines[rank]

    def everywhere(self, function: Callable[[LLMEngine], None], leader: LLMEngine) -> None:
        """Have every rank call ``function`` of its engine, each in its own thread, at once."""
        waits = [self._errand(rank, function) for rank in range(1, len(self._threads) + 1)]
        function(leader)
        for wait in waits:
            wait()

    def _errand(self, rank: int, function: Callable[[LLMEngine], None]) -> Callable[[], None]:
        """Send a rank on it; what is returned waits for its end."""
        deadline = time.monotonic() + PATIENCE
        while rank not in self.engines:
            self.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {rank} has no engine")
            time.sleep(0.01)
        done = threading.Event()
        engine = self.engines[rank]

        def run() -> None:
            function(engine)
            done.set()

        def wait() -> None:
            if not done.wait(PATIENCE):
                self.check()
                raise TimeoutError(f"rank {rank} does not go on")

        engine.errand = run  # type: ignore[attr-defined]
        Sender([self._pipes[rank - 1][1]]).call("errand")
        return wait

    def check(self) -> None:
        if self.error is not None:
            raise WorkerDied(str(self.error)) from self.error

    def lost(self, error: BaseException) -> BaseException:
        for thread in self._threads:
            thread.join(0.5)
        found = self.error
        self.error = self.error or WorkerDied(f"{type(error).__name__}: {error}")
        self.close()
        return error if found is None or isinstance(error, ConfigError) else WorkerDied(str(found))

    def free(self) -> None:
        return None

    def close(self) -> None:
        if self.error is None:
            with suppress(OSError):
                self.sender.call("shutdown")
        for _, sending in self._pipes:
            sending.close()
        for thread in self._threads:
            thread.join(PATIENCE)
        for receiving, _ in self._pipes:
            receiving.close()


@contextmanager
def ranks_in_threads(
    managers: Callable[[], PluginManager | None] = lambda: None,
) -> Iterator[list[Threads]]:
    """Engines that are made inside have threads for their other ranks; all that were started so.

    Args:
        managers: makes one for each other rank; None: the process's.
    """
    started: list[Threads] = []

    def start(args: Any, ranks: int, device: torch.device, executor: Any) -> Ranks:
        if ranks == 1:
            return Alone()
        threads = Threads(args, ranks, managers)
        started.append(threads)
        return Leading(threads.group(0, ranks, threads.sender), threads)  # type: ignore[arg-type]

    true_start = assembling.start_ranks
    assembling.start_ranks = start  # type: ignore[assignment]
    try:
        yield started
    finally:
        assembling.start_ranks = true_start
