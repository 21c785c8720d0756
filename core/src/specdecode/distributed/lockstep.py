"""What an engine is told of its ranks: that it is alone, that it leads others, or that it follows rank 0."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from ..contract import ConfigError
from .channel import Receiver
from .errors import WorkerDied
from .group import SOLO, Group
from .processes import Workers


class Ranks(Protocol):
    """One engine of a lockstep."""

    group: Group

    @property
    def pids(self) -> Sequence[int]:
        """Of the other ranks' processes, in their order; empty on another rank."""

    def announce(self, method: str, *args: Any) -> None:
        """Have the other ranks' engines call ``method``, before this one does; nothing on another rank.

        Raises:
            ConfigError: an argument cannot be sent to another process; nothing has happened.
            WorkerDied: a rank has ended.
        """

    def announce_if_alive(self, method: str, *args: Any) -> None:
        """The same, and nothing if a rank has ended."""

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Around what all ranks compute together.

        Whatever is raised inside ends the lockstep: nobody knows how far the other ranks came. If one of
        them has ended, it becomes :class:`WorkerDied`.
        """

    def close(self) -> None:
        """End the other ranks. May be called twice."""


class Alone:
    """An engine without other ranks."""

    group: Group = SOLO
    pids: Sequence[int] = ()

    def announce(self, method: str, *args: Any) -> None:
        return None

    announce_if_alive = announce

    def together(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def close(self) -> None:
        return None


class Following(Alone):
    """An engine that does what rank 0 announces."""

    def __init__(self, group: Group, calls: Receiver) -> None:
        self.group = group
        self.calls = calls


class Leading:
    """Rank 0's engine, and the processes of the others."""

    def __init__(self, group: Group, workers: Workers) -> None:
        self.group = group
        self._workers = workers

    @property
    def pids(self) -> Sequence[int]:
        return self._workers.pids

    def announce(self, method: str, *args: Any) -> None:
        self._workers.check()
        try:
            self._workers.sender.call(method, *args)
        except OSError as error:
            raise self._workers.lost(error) from error
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"a request's parameters go to {self.group.size - 1} other processes under "
                f"tensor_parallel_size={self.group.size}, and cannot ({error}): use functions and classes "
                "that a module holds, such as logits processors that are no lambdas"
            ) from error

    def announce_if_alive(self, method: str, *args: Any) -> None:
        if self._workers.error is None:
            with contextlib.suppress(WorkerDied):
                self.announce(method, *args)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        self._workers.computing = True
        try:
            yield
            self._workers.check()
        except BaseException as error:
            self._workers.computing = False
            raise self._workers.lost(error) from error
        finally:
            self._workers.computing = False

    def close(self) -> None:
        self._workers.close()
        self._workers.free()
