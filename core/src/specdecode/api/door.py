"""Where requests are read before they are queued: beside the event loop, what takes long beside the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

#: Characters, or token ids, from which on a text is long: some tens of milliseconds to tokenize.
LONG = 50_000


class Door:
    """Runs functions one after the other, long ones in a thread of their own: they hold up only their like.

    A tokenizer serves several threads, once it has been called.
    """

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(1, thread_name_prefix="specdecode-door")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="specdecode-long-door")

    async def run(self, function: Callable[[], T], *, long: bool = False) -> T:
        """The result of ``function``; ``long``: others need not wait for it."""
        executor = self._long if long else self._short
        return await asyncio.get_running_loop().run_in_executor(executor, function)

    def shutdown(self, *, wait: bool = True) -> None:
        """Take no more; ``wait``: until what runs has ended."""
        self._short.shutdown(wait)
        self._long.shutdown(wait)


def is_long(given: Any) -> bool:
    """Whether a prompt or a conversation takes long to be read: its texts and token ids together."""
    left, size = [given], 0
    while left and size < LONG:
        match left.pop():
            case str(text):
                size += len(text)
            case Mapping() as entries:
                left += entries.values()
            case list() | tuple() as parts:
                size += len(parts)
                left += (part for part in parts[:LONG] if not isinstance(part, int))
    return size >= LONG
