"""A replica: one engine in an actor of Ray Serve."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import attrs
import ray
from ray import serve
from specdecode import AsyncLLM, RequestOutput
from specdecode.api.engine_thread import EngineStuckError
from specdecode.api.prompts import TokenizedPrompt
from specdecode.engine.metrics import Metric

from .messages import Accepted, Ask, Description, Order, Pulse, Question, Whereabouts


class Replica:
    """Serves :class:`Ask` s; Ray Serve starts it, watches its health and ends it.

    What it accepted it finishes before it is ended, within the fleet's ``drain_timeout``.
    """

    def __init__(self, engine: Mapping[str, Any], stuck_after: float, pulse: float) -> None:
        """
        Args:
            engine: keywords of :class:`~specdecode.AsyncLLM`.
            stuck_after: seconds of a step after which the replica counts as hung and is replaced.
            pulse: seconds without an output after which a request is told that its replica lives.
        """
        self._llm = AsyncLLM(**engine)
        self._stuck_after = stuck_after
        self._pulse = pulse
        self._stuck = False
        self._name = serve.get_replica_context().replica_id.unique_id

    def __del__(self) -> None:
        if hasattr(self, "_llm") and not self._stuck:  # a step that hangs would be waited for
            self._llm.shutdown()

    async def check_health(self) -> None:
        """Raise if the engine has stopped or hangs: Ray Serve then replaces the replica."""
        try:
            await self._llm.check_health(self._stuck_after)
        except EngineStuckError:
            self._stuck = True
            raise

    # -- requests -------------------------------------------------------------------------------
    async def prepare(self, question: Question) -> TokenizedPrompt:
        """As :meth:`specdecode.AsyncLLM.prepare`."""
        return await self._llm.prepare(question.prompt, question.params, where=question.where)

    async def generate(self, ask: Ask) -> AsyncGenerator[Accepted | Pulse | RequestOutput, None]:
        """:class:`Accepted`, then outputs, which leave out the prompt that the door has.

        Raises:
            ConfigError: it cannot be served.
            EngineDeadError: the engine has stopped.
            EngineStuckError: it hangs.
        """
        stream = await self._llm.add_request(
            ask.request_id, ask.prompt, ask.params, priority=ask.priority, lora_request=ask.lora_request
        )
        with contextlib.closing(stream):
            yield Accepted(self._name)
            while True:
                try:
                    async with asyncio.timeout(self._pulse):
                        output = await anext(stream, None)
                except TimeoutError:
                    await self.check_health()
                    yield Pulse()
                    continue
                if output is None:
                    return
                yield attrs.evolve(output, prompt=None, prompt_token_ids=[])

    # -- looking in -----------------------------------------------------------------------------
    async def carry_out(self, order: Order) -> Any:
        """The call that the order holds."""
        return await getattr(self, order.method)(*order.args)

    async def describe(self) -> Description:
        return Description(
            facts=self._llm.facts,
            tokenizer=self._llm.get_tokenizer(),
            defaults=self._llm.get_default_sampling_params(),
        )

    async def whereabouts(self) -> Whereabouts:
        node = ray.get_runtime_context().get_node_id()
        return Whereabouts(replica=self._name, node=node, pid=os.getpid())

    async def metrics(self) -> tuple[str, list[Metric]]:
        """The name of the replica, and its engine's metrics."""
        return self._name, await self._llm.get_metrics()

    # -- operation ------------------------------------------------------------------------------
    async def reset_prefix_cache(self) -> bool:
        return await self._llm.reset_prefix_cache()

    async def sleep(self, level: int) -> None:
        await self._llm.sleep(level)

    async def wake_up(self) -> None:
        await self._llm.wake_up()

    async def is_sleeping(self) -> bool:
        return await self._llm.is_sleeping()
