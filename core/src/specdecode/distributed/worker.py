"""What runs in the process of another rank: an engine that does what rank 0 announces."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import attrs

from .channel import Receiver
from .errors import WorkerDied

#: Seconds between two looks at whether rank 0 still lives.
_LOOK = 1.0
#: Seconds that a rank has to end by itself when rank 0 has hung up.
_GRACE = 5.0


@attrs.frozen(kw_only=True)
class Setup:
    """All that a rank is told at its start."""

    args: Any  #: the engine's arguments
    rank: int
    ranks: int
    host: str  #: of rank 0's store
    port: int
    device: str
    index: int  #: of the GPU, among those that the process sees
    threads: int  #: of torch on a CPU, as rank 0 has them: the bits of a sum must not depend on them


def main(calls: int, reports: int) -> None:
    """Follow rank 0 until it ends.

    Args:
        calls, reports: file descriptors of the pipes.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal; rank 0 decides what it means
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    code = serve(Connection(calls, writable=False), Connection(reports, readable=False))
    os._exit(code)  # no collective that is still under way may keep it


def serve(inbox: Connection, outbox: Connection) -> int:
    """Follow rank 0 until it ends, in a process that is for nothing else and ends then, with this status.

    Args:
        inbox: what rank 0 says, a :class:`Setup` first.
        outbox: where a reason is told.
    """
    code = 0
    done = threading.Event()
    threading.Thread(target=_end_without, args=(inbox.fileno(), done), daemon=True).start()
    try:
        _serve(inbox)
    except (EOFError, ConnectionResetError):  # rank 0 is gone
        code = 0
    except BaseException as error:
        with contextlib.suppress(OSError):
            outbox.send(f"raised {_told(error)}")
        code = 1
    outbox.close()
    done.set()
    return code


def _told(error: BaseException) -> str:
    from ..contract import SpecdecodeError

    if isinstance(error, SpecdecodeError):
        return f"{type(error).__name__}: {error}"
    return "".join(traceback.format_exception(error)).strip()


def _serve(inbox: Connection) -> None:
    setup: Setup = inbox.recv()
    logging.getLogger("specdecode").setLevel(logging.ERROR)  # rank 0 says the rest
    import torch

    from ..api.assemble import assemble
    from ..api.engine import LLMEngine
    from .lockstep import Following
    from .rendezvous import join, reach_store

    torch.set_num_threads(setup.threads)
    receiver = Receiver(inbox)
    store = reach_store(setup.host, setup.port, setup.rank, setup.ranks)
    device = torch.device(setup.device, setup.index)
    group, _release = join(store, setup.rank, setup.ranks, device=device, told=receiver, check=lambda: None)
    engine = LLMEngine.from_parts(setup.args, assemble(setup.args, ranks=Following(group, receiver)))
    follow(engine, receiver)


def follow(engine: Any, calls: Receiver) -> None:
    """Do what rank 0 announces, until it shuts down."""
    while True:
        method, args = calls.next_call()
        if method == "shutdown":
            engine.shutdown()
            return
        if method == "step":
            (told,) = args
            if told != (own := engine.trace()):
                raise WorkerDied(f"the ranks have parted: rank 0 is at {told}, rank {engine.rank} at {own}")
            engine.step()
        elif method == "queue":  # a request that cannot be queued cannot on any rank, and rank 0 says so
            with contextlib.suppress(Exception):
                engine.queue(*args)
        else:
            getattr(engine, method)(*args)


def _end_with(parent: int) -> None:
    """End when the process of rank 0 has, even in a collective that waits for it."""
    while os.getppid() == parent:
        time.sleep(_LOOK)
    os._exit(1)


def _end_without(calls: int, done: threading.Event) -> None:
    """End soon after rank 0 has hung up, even in a collective that waits for it.

    Args:
        calls: file descriptor at which it spoke.
        done: set when this rank has ended by itself.
    """
    if not hasattr(select, "poll"):
        return
    hung_up = select.poll()
    hung_up.register(calls, getattr(select, "POLLRDHUP", 0))  # of a pipe's end it tells unasked
    hung_up.poll()
    if not done.wait(_GRACE):
        os._exit(1)
