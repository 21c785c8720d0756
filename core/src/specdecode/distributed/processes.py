"""The processes of the other ranks: watched and ended by rank 0."""

from __future__ import annotations

import atexit
import contextlib
import logging
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from ..contract import SpecdecodeError
from .channel import Sender
from .errors import WorkerDied
from .executors import Worker
from .release import NoRelease, Release

logger = logging.getLogger(__name__)

#: Seconds that workers are given to end by themselves.
_PATIENCE = 10.0
#: Seconds to wait for a worker that seems to have ended to be known as ended.
_NOTICE = 3.0
#: Seconds to wait for what the collectives hold to be given back.
_FREEING = 5.0
#: Seconds in which a computation ends whose collectives were called off.
_RELEASING = 5.0


def epitaph(worker: Worker) -> str:
    """Why a worker ended, as far as it could tell."""
    told = None
    with contextlib.suppress(EOFError, OSError):
        while worker.reports.poll():
            told = worker.reports.recv()
    code = worker.process.poll()
    how = "ended" if code is None else f"was killed by signal {-code}" if code < 0 else f"exited with {code}"
    return f"the worker of rank {worker.rank} (process {worker.process.pid}) {told or how}"


class Workers:
    """The other ranks' processes. Whatever becomes of this process, they end.

    Attributes:
        sender: tells them what to do.
        error: why they are lost; None while all is well.
        computing: whether this process is about something that it computes with them.
    """

    computing = False

    def __init__(self, workers: Sequence[Worker], setup: Sequence[Any]) -> None:
        """
        Args:
            setup: what each is told first.
        """
        calls = [worker.calls for worker in workers]
        self._workers = workers
        self.sender = Sender(calls)
        self.error: WorkerDied | None = None
        self._release: Release = NoRelease()
        self._calling: threading.Thread | None = None
        self._closing = threading.Event()
        self._lock = threading.Lock()
        # A process of Python's that ends without close(): at its exit, or when the engine is collected.
        self._end = weakref.finalize(self, _end, workers, calls, self._closing)
        for pipe, content in zip(calls, setup, strict=True):
            with contextlib.suppress(OSError):  # one that has ended; the watch sees it
                pipe.send(content)
        self._watch = threading.Thread(
            target=_watch, args=(weakref.ref(self), workers), name="specdecode-ranks", daemon=True
        )
        self._watch.start()

    @property
    def pids(self) -> list[int]:
        """Of the other ranks' processes, in their order."""
        return [worker.process.pid for worker in self._workers]

    def on_loss(self, release: Release) -> None:
        """What frees this process, from other threads, when a worker has ended."""
        self._release = release

    def check(self) -> None:
        """Raise :class:`WorkerDied` if a worker has ended."""
        if self.error is not None:
            raise WorkerDied(str(self.error))

    def lost(self, error: BaseException) -> BaseException:
        """End all workers after ``error``: what to raise for it.

        That is ``error`` itself, but what became of the worker if its end came first: then all that
        ``error`` tells is that this process felt it, be it that the ranks' group was called off.
        """
        if isinstance(error, Exception) and not isinstance(error, SpecdecodeError):
            deadline = time.monotonic() + _NOTICE
            while self.error is None and time.monotonic() < deadline:
                time.sleep(0.02)  # the watch knows better, and a moment later
        found = self.error
        with self._lock:
            if self.error is None:
                self.error = WorkerDied(
                    f"a step of the ranks raised {type(error).__name__} ({error}), so that they do not know "
                    "of each other how far they came: make the engine anew"
                )
        self.close()
        return error if found is None else WorkerDied(str(found))

    def fail(self, reason: str) -> None:
        """A worker has ended: remember why, end the others and free who waits for them."""
        with self._lock:
            if self._closing.is_set() or self.error is not None:
                return
            self.error = WorkerDied(f"{reason}: no request can go on, make the engine anew")
        logger.error("%s", self.error)
        for worker in self._workers:
            worker.process.kill()
        # Calling off frees who waits at once, and may itself wait until the engine's graphs are gone.
        self._calling = _apart(self._release.call_off)
        deadline = time.monotonic() + _RELEASING
        while self.computing and time.monotonic() < deadline:
            time.sleep(0.02)
        if self.computing:
            self.error = WorkerDied(
                f"{reason}: no request can go on. What this process's GPU did had to be stopped, which ends "
                "its use of the GPU: make the engine anew in another process"
            )
            _apart(self._release.stop)

    def close(self) -> None:
        """End all workers, and wait until they have ended."""
        with self._lock:
            self._closing.set()
        if self.error is not None:
            for worker in self._workers:
                worker.process.kill()
        else:
            with contextlib.suppress(OSError):
                self.sender.call("shutdown")
        self._end()

    def free(self) -> None:
        """Give back what the collectives hold, when no graph holds it any more."""
        if self._calling is not None:
            self._calling.join(_FREEING)
        _apart(self._release.free).join(_FREEING)


def _apart(function: Callable[[], None]) -> threading.Thread:
    """A thread that calls ``function``, which may never return."""

    def run() -> None:
        try:
            function()
        except Exception:
            logger.exception("freeing the collectives raised")

    thread = threading.Thread(target=run, name="specdecode-free", daemon=True)
    thread.start()
    # To come back from torch while the interpreter ends would abort the process.
    atexit.register(thread.join, _FREEING)
    return thread


def _watch(owner: weakref.ref[Workers], workers: Sequence[Worker]) -> None:
    """Wait for the first report; an end without a report shows as the end of the pipe."""
    wait([worker.reports for worker in workers])
    workers_left = owner()
    if workers_left is None:
        return
    time.sleep(0.05)  # whoever reported is about to end
    ready = wait([worker.reports for worker in workers], timeout=0)
    first = next((worker for worker in workers if worker.reports in ready), workers[0])
    with contextlib.suppress(subprocess.TimeoutExpired):
        first.process.wait(1.0)
    workers_left.fail(epitaph(first))


def _end(workers: Sequence[Worker], calls: Sequence[Connection], closing: threading.Event) -> None:
    """Close the pipes, whose end every worker takes for its own; kill who does not end."""
    closing.set()
    for pipe in calls:
        with contextlib.suppress(OSError):
            pipe.close()
    deadline = time.monotonic() + _PATIENCE
    for worker in workers:
        try:
            worker.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            logger.warning("the worker of rank %d did not end and is killed", worker.rank)
            worker.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # its driver may hold it
                worker.process.wait(_NOTICE)
