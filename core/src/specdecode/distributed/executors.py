"""Where the processes of the other ranks run: on this machine, or where a plugin's executor starts them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any, Protocol

import attrs
import torch

from ..contract import ConfigError

#: ``distributed_executor_backend`` of :class:`LocalProcesses`.
LOCAL = "mp"

_MAIN = (
    "import sys; sys.path[:] = {path!r}; "
    "from specdecode.distributed.worker import main; main({calls}, {reports})"
)


class Process(Protocol):
    """A process, as :class:`subprocess.Popen` has it."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def kill(self) -> None: ...
    def wait(self, timeout: float | None = None) -> int:
        """Its status; ``subprocess.TimeoutExpired`` if it has not ended by then."""


@attrs.frozen(eq=False)
class Worker:
    """The process of another rank, that does what :func:`specdecode.distributed.worker.serve` does."""

    rank: int
    process: Process
    calls: Connection  #: what it is told
    reports: Connection  #: what it may say of its end; closed when it ends


class Executor(Protocol):
    """Starts the other ranks' processes, which end with this one."""

    @property
    def name(self) -> str:
        """As ``distributed_executor_backend`` has it."""

    @property
    def host(self) -> str:
        """Address of this machine, at which the others reach it."""

    def device_of(self, rank: int) -> int:
        """Number of the rank's GPU, among those that its process sees; asked for after :meth:`start`."""

    def check(self, ranks: int, device: str) -> None:
        """Raise ConfigError where there cannot be so many ranks; ``device``: as the engine has it."""

    def start(self, ranks: int) -> Sequence[Worker]:
        """The processes of ranks 1 to ``ranks - 1``.

        Raises:
            SpecdecodeError: there is no room for them, or one ended at once.
        """


class LocalProcesses:
    """Processes of this machine, each with the GPU of its rank's number."""

    name = LOCAL
    host = "127.0.0.1"

    def device_of(self, rank: int) -> int:
        return rank

    def check(self, ranks: int, device: str) -> None:
        check_kind(ranks, device)
        there = torch.cuda.device_count() if torch.device(device).type == "cuda" else ranks
        if there < ranks:
            raise ConfigError(
                f"tensor_parallel_size={ranks} wants as many GPUs, and {there} can be seen here: "
                f"use at most {there}, or device='cpu'"
            )

    def start(self, ranks: int) -> Sequence[Worker]:
        return [self._start(rank) for rank in range(1, ranks)]

    @staticmethod
    def _start(rank: int) -> Worker:
        receiving, sending = Pipe(duplex=False)
        reports, reporting = Pipe(duplex=False)
        code = _MAIN.format(path=sys.path, calls=receiving.fileno(), reports=reporting.fileno())
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=(receiving.fileno(), reporting.fileno()),
            stdin=subprocess.DEVNULL,
        )
        receiving.close()
        reporting.close()
        return Worker(rank, process, sending, reports)


def check_kind(ranks: int, device: str) -> None:
    """Raise ConfigError for devices that ranks cannot share a model on."""
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


def executor_called(name: str | None, offered: Callable[[], Iterable[Any]]) -> Executor:
    """The executor of a name.

    Args:
        name: None: on this machine.
        offered: gives those of plugins; asked for where the name is not core's own.

    Raises:
        ConfigError: there is none of that name.
    """
    if name is None or name == LOCAL:
        return LocalProcesses()
    known: dict[str, Executor] = {LOCAL: LocalProcesses()}
    known |= {executor.name: executor for executor in offered() if executor.name != LOCAL}
    if name not in known:
        raise ConfigError(
            f"distributed_executor_backend={name!r} is none of {', '.join(known)}: leave it out for this "
            "machine's devices; 'ray', for those of several machines, comes with: pip install specdec-fleet"
        )
    return known[name]
