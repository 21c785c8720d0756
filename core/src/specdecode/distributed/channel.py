"""From rank 0 to the others: what to do next, and values of the host, in one order.

All ranks run the same program on the same requests. So what rank 0 sends needs no names: who asks for the
next message knows what it is, and a message of another kind shows that the ranks have parted.
"""

from __future__ import annotations

import enum
import pickle
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from .errors import WorkerDied

Value = TypeVar("Value")


class Kind(enum.Enum):
    """What a message is."""

    CALL = "call"  #: a method of the engine and its arguments
    VALUE = "value"  #: of :meth:`Sender.agree`


class Sender:
    """Rank 0's end."""

    def __init__(self, pipes: Sequence[Connection]) -> None:
        self._pipes = pipes

    def call(self, method: str, *args: Any) -> None:
        """Have every other rank call ``method`` of its engine.

        Raises:
            pickle.PicklingError, TypeError, AttributeError: an argument cannot be sent; nothing was.
            OSError: a rank has ended.
        """
        self._send(Kind.CALL, (method, args))

    def agree(self, value: Value) -> Value:
        self._send(Kind.VALUE, value)
        return value

    def _send(self, kind: Kind, content: Any) -> None:
        message = pickle.dumps((kind, content), pickle.HIGHEST_PROTOCOL)
        for pipe in self._pipes:
            pipe.send_bytes(message)


class Receiver:
    """Another rank's end."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def next_call(self) -> tuple[str, tuple[Any, ...]]:
        """Wait for the next call; EOFError if rank 0 has ended."""
        method, args = self._next(Kind.CALL)
        return method, args

    def agree(self, value: Value) -> Value:
        """Rank 0's value in place of this rank's."""
        told: Value = self._next(Kind.VALUE)
        return told

    def _next(self, wanted: Kind) -> Any:
        kind, content = pickle.loads(self._pipe.recv_bytes())
        if kind is not wanted:
            raise WorkerDied(
                f"the ranks have parted: rank 0 sent a {kind.value} where a {wanted.value} was due"
            )
        return content
