"""The replicas as the door calls them, and what Ray's errors mean for a request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any, Protocol

from ray.exceptions import RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from specdecode import RequestOutput
from specdecode.api.engine_thread import EngineDeadError
from specdecode.contract import SpecdecodeError

from .errors import ReplicaLost
from .messages import Accepted, Ask

logger = logging.getLogger(__name__)


class Replicas(Protocol):
    """Engines elsewhere, all alike."""

    def generate(self, ask: Ask) -> AsyncGenerator[Accepted | RequestOutput, None]:
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

    async def generate(self, ask: Ask) -> AsyncGenerator[Accepted | RequestOutput, None]:
        response: Any = self._generate.remote(ask)
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
        try:
            return await self._handle.options(method_name=method).remote(*args)
        except (RayError, RayServeException, asyncio.CancelledError) as error:
            raise _meaning(error) from error

    async def broadcast(self, method: str, *args: Any, timeout: float) -> list[Any]:
        try:
            response = self._handle.broadcast(method, *args)
            results = await response.results_async(timeout_s=timeout, return_exceptions=True)
        except (RayError, RayServeException, TimeoutError) as error:
            logger.warning("%s was not answered by all replicas: %s", method, error or "it took too long")
            return []
        failed = [one for one in results if isinstance(one, BaseException)]
        for reason in failed:
            logger.warning("%s failed on a replica: %s", method, _meaning(reason))
        return [one for one in results if not isinstance(one, BaseException)]


def _meaning(error: BaseException) -> BaseException:
    """What to raise for an error that came instead of an answer."""
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError | TaskCancelledError):
        if task is not None and task.cancelling():
            return asyncio.CancelledError()  # it is the reader that has gone
        return ReplicaLost("the replica was ended", dead=False)
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, EngineDeadError):
            return ReplicaLost(str(cause), dead=True)
        if isinstance(cause, SpecdecodeError):
            return cause
        if isinstance(cause, asyncio.CancelledError):
            return ReplicaLost("the replica was ended", dead=False)
        if not isinstance(cause, RayError):
            return error  # a mistake in the replica's code, which another one would repeat
    return ReplicaLost(f"{type(error).__name__}: {_first_line(error)}", dead=False)


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), "no reason given")
