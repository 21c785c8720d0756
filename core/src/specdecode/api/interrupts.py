"""Ctrl-C between two steps of an engine, never within one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

#: Raises KeyboardInterrupt if there was an interrupt since the last time.
Check = Callable[[], None]


@contextmanager
def held_back_interrupts() -> Iterator[Check]:
    """Hold SIGINT back until the next call of what this yields, or the end of the block.

    A KeyboardInterrupt at any line could leave a block allocated that nobody knows of, or a request
    half added. A second SIGINT before the first was raised is raised at once: the step may hang.
    Where SIGINT has a handler that is not Python's own, and outside the main thread, which no
    signal reaches, nothing changes.
    """
    default = signal.default_int_handler
    reached = threading.current_thread() is threading.main_thread()
    if not reached or signal.getsignal(signal.SIGINT) is not default:
        yield lambda: None
        return
    held = False

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal held
        if held:
            default(number, frame)
        held = True

    def check() -> None:
        nonlocal held
        if held:
            held = False
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, hold)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, default)
        check()
