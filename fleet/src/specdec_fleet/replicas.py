"""The replicas as the door calls them, and what Ray's errors mean for a request."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
from collections.abc import AsyncGenerator, Callable
from typing import Any, Protocol

from ray.exceptions import RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from specdecode import RequestOutput
from specdecode.api.engine_thread import EngineDeadError, EngineStuckError
from specdecode.contract import SpecdecodeError

from .errors import ReplicaLost
from .messages import Accepted, Ask, Order, Pulse
from .presence import present

logger = logging.getLogger(__name__)


class Replicas(Protocol):
    """Engines elsewhere, all alike."""

    def generate(self, ask: Ask) -> AsyncGenerator[Accepted | Pulse | RequestOutput, None]:
        """One attempt at a request, on some replica; to be closed.

        Raises:
            ReplicaLost: the replica did not bring it to its end.
            SpecdecodeError: the replica refuses it.
        """

    async def call(self, method: str, *args: Any) -> Any:
        """A method of some replica.

        Raises:
            ReplicaLost: it was lost meanwhile.
        """

    async def broadcast(self, method: str, *args: Any, timeout: float) -> list[Any]:
        """A method of every replica: the results of those that gave one within ``timeout`` seconds."""


class ServeReplicas:
    """Through a handle of Ray Serve, whose router chooses the replica: ``routing.py``."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle
        self._generate = handle.options(method_name="generate", stream=True)

    async def generate(self, ask: Ask) -> AsyncGenerator[Accepted | Pulse | RequestOutput, None]:
        response = _apart(self._generate.remote, ask)
        ended = False
        try:
            async for message in response:
                yield message
            ended = True
        except (RayError, RayServeException, asyncio.CancelledError) as error:
            ended = isinstance(error, RayError)
            raise _meaning(error) from error
        finally:
            if not ended:
                response.cancel()

    async def call(self, method: str, *args: Any) -> Any:
        response = _apart(self._handle.options(method_name=method).remote, *args)
        try:
            return await response
        except (RayError, RayServeException, asyncio.CancelledError) as error:
            response.cancel()
            raise _meaning(error) from error

    async def broadcast(self, method: str, *args: Any, timeout: float) -> list[Any]:
        orders = [Order(replica, method, args) for replica in present(self._handle.app_name)]
        answers = await asyncio.gather(*(self._carry_out(order, timeout) for order in orders))
        return [answer for answered, answer in answers if answered]

    async def _carry_out(self, order: Order, timeout: float) -> tuple[bool, Any]:
        """Whether it was done, and what came of it. One replica that hangs holds no other up."""
        try:
            async with asyncio.timeout(timeout):
                return True, await self.call("carry_out", order)
        except Exception as error:
            logger.warning("%s failed on replica %s: %s", order.method, order.replica, error or "no answer")
            return False, None


def _apart(function: Callable[..., Any], *args: Any) -> Any:
    """Call outside of the HTTP request that is being served.

    Ray Serve would give all calls of one HTTP request the same id, by which its router tells them apart: of
    several at a time, one would be routed.
    """
    return contextvars.Context().run(function, *args)


def _meaning(error: BaseException) -> BaseException:
    """What to raise for an error that came instead of an answer."""
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError | TaskCancelledError):
        if task is not None and task.cancelling():
            return asyncio.CancelledError()  # it is the reader that has gone
        return ReplicaLost("the replica was ended")
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, EngineDeadError | EngineStuckError):
            return ReplicaLost(str(cause), shunned=math.inf)
        if isinstance(cause, SpecdecodeError):
            return cause
        if isinstance(cause, asyncio.CancelledError):
            return ReplicaLost("the replica was ended")
        if not isinstance(cause, RayError):
            return error  # a mistake in the replica's code, which another one would repeat
    return ReplicaLost(f"{type(error).__name__}: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), "no reason given")
