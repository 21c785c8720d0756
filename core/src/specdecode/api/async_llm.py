"""AsyncLLM: many requests at a time from coroutines, one engine thread behind them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from types import TracebackType
from typing import Any, TypeVar

from ..contract import ConfigError
from ..engine.metrics import Metric
from ..lora.request import LoRARequest
from ..models import WeightSource
from ..plugins.records import MethodRecord
from .args import EngineArgs
from .door import Door, is_long
from .engine import LLMEngine
from .engine_thread import EngineThread
from .facts import EngineFacts
from .memory import MemoryPlan
from .outputs import RequestOutput
from .params import SamplingParams
from .prompts import TokenizedPrompt
from .streams import RequestStream
from .updating import UpdateMode, WeightUpdate, check_mode

T = TypeVar("T")

#: Seconds that a step may take before the engine counts as stuck. The first ones may compile kernels.
STUCK_AFTER = 120.0


class AsyncEngineArgs(EngineArgs):
    """Arguments of :class:`AsyncLLM`: those of :class:`EngineArgs`."""


class AsyncLLM:
    """A model that serves coroutines. Loading it takes its time: do that before the event loop runs.

    The engine runs in a thread of its own, prompts are tokenized in another. Requests are batched
    together as they come; what goes wrong in one ends that one only. When the engine itself has
    stopped, every request that waits ends with :class:`EngineDeadError`.

    Args:
        model: as for :class:`~specdecode.LLM`, which has the same arguments.

    Raises:
        ConfigError: every unknown or wrong argument, each with the remedy.
        Unsupported: a combination this version cannot serve.
    """

    def __init__(self, model: str, *, speculative_config: Any = None, **keywords: Any) -> None:
        args = EngineArgs.of({"model": model, "speculative_config": speculative_config, **keywords})
        self._start(LLMEngine(args))

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> AsyncLLM:
        """Build from arguments.

        Raises:
            ConfigError: see :meth:`EngineArgs.of`.
        """
        return cls.from_engine(LLMEngine.from_engine_args(engine_args))

    @classmethod
    def from_engine(cls, engine: LLMEngine) -> AsyncLLM:
        """Serve an engine that nobody else steps from now on."""
        llm = cls.__new__(cls)
        llm._start(engine)
        return llm

    def _start(self, engine: LLMEngine) -> None:
        self._engine = engine
        if engine.tokenizer is not None:
            engine.tokenizer("a")  # some change themselves at their first call, which no two threads may
        self._door = Door()
        self._thread = EngineThread(engine)

    # -- requests -------------------------------------------------------------------------------
    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        lora_request: LoRARequest | None = None,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of a request as they come, as its ``output_kind`` says; the last one is finished.

        A consumer that is slower than the engine gets several steps at once. One that stops early
        (``break``, cancellation) aborts the request.

        Args:
            prompt: a string, ``TextPrompt`` or ``TokensPrompt``.
            request_id: not in use by another request that runs.
            lora_request: the adapter to answer with; None: the model as it is.
            priority: under ``scheduling_policy="priority"`` lower ones are served first.

        Raises:
            ConfigError: the request cannot be served.
            EngineDeadError: the engine has stopped.
        """
        stream = await self.add_request(
            request_id, prompt, sampling_params, priority=priority, lora_request=lora_request
        )
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    async def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> RequestStream:
        """Queue a request; its outputs come through the stream, which is to be closed.

        Raises:
            ConfigError: the prompt or the parameters cannot be served. An id that is in use is told
                by the stream.
            EngineDeadError: the engine has stopped.
        """
        self._engine.check_priority(priority)
        if lora_request is not None:
            await self.add_lora(lora_request)
        tokenized = await self.prepare(prompt, params)
        stream = RequestStream(request_id, params.output_kind, self._thread.abort)
        self._thread.submit(stream, tokenized, params.snapshot(), priority, lora_request)
        return stream

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Check an adapter before a request asks for it; True.

        Raises:
            ConfigError: it cannot be served.
            EngineDeadError: the engine has stopped.
        """
        return await self.at_the_door(lambda: self._engine.add_lora(lora_request))

    async def prepare(self, prompt: Any, params: SamplingParams, *, where: str = "prompt") -> TokenizedPrompt:
        """Tokenize and check a prompt and its parameters without queueing them.

        Args:
            where: what messages of errors call the prompt.

        Raises:
            ConfigError: names the field, the value and the remedy.
            EngineDeadError: the engine has stopped.
        """
        if isinstance(prompt, TokenizedPrompt):
            return prompt
        # Compiling a structure may take seconds.
        structured = isinstance(params, SamplingParams) and params.structure is not None
        return await self.at_the_door(
            lambda: self._engine.prepare(prompt, params, where=where), long=structured or is_long(prompt)
        )

    async def at_the_door(self, function: Callable[[], T], *, long: bool = False) -> T:
        """Run ``function`` where prompts are tokenized: beside the event loop, one after the other.

        Args:
            long: it takes its time, and only others like it wait for it.

        Raises:
            EngineDeadError: the engine has stopped.
        """
        if self._thread.error is not None:
            raise self._thread.error
        return await self._door.run(function, long=long)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests, each with a last output of ``finish_reason="abort"``; unknown ids are passed over."""
        self._thread.end([request_id] if isinstance(request_id, str) else request_id)

    # -- looking in -----------------------------------------------------------------------------
    async def call(self, function: Callable[[LLMEngine], T]) -> T:
        """Run ``function`` on the engine between two steps.

        Raises:
            EngineDeadError: the engine has stopped.
        """
        return await asyncio.wrap_future(self._thread.call(function))

    async def get_metrics(self) -> list[Metric]:
        """Counters, gauges, histograms and vectors since the engine started; see ``docs/metrics.md``."""
        return await self.call(LLMEngine.get_metrics)

    async def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False while requests run."""
        return await self.call(LLMEngine.reset_prefix_cache)

    async def update_weights(self, source: WeightSource, *, mode: UpdateMode = "wait") -> WeightUpdate:
        """Replace the model's weights in place, as :meth:`LLMEngine.update_weights` does.

        Requests that come meanwhile wait at the door and are served by the new weights. Under "wait" those
        that were there finish by the old ones first, which an engine that sleeps will not do. Updates are
        made one after the other.

        Raises:
            ConfigError: ``source`` does not fit the model, there is no such mode, or requests are to finish
                and the engine sleeps; nothing was changed.
            EngineDeadError: the engine has stopped, or reading failed in the middle.
        """
        check_mode(mode)
        new = await asyncio.to_thread(self._engine.find_weights, source)
        return await asyncio.wrap_future(self._thread.update(new, mode))

    async def sleep(self, level: int = 0) -> None:
        """Take no steps until :meth:`wake_up`: requests that run or come wait as they are.

        Args:
            level: 0; vLLM's levels 1 and 2, which give memory back, are refused.

        Raises:
            ConfigError: another level.
            EngineDeadError: the engine has stopped.
        """
        if level != 0:
            raise ConfigError(
                f"level={level!r} is refused: an engine cannot give its memory back and live, since captured "
                "graphs hold its addresses; use level=0, or stop the server"
            )
        await asyncio.wrap_future(self._thread.pause(True))

    async def wake_up(self) -> None:
        """Go on after :meth:`sleep`."""
        await asyncio.wrap_future(self._thread.pause(False))

    async def is_sleeping(self) -> bool:
        return self._thread.paused

    async def check_health(self, stuck_after: float = STUCK_AFTER) -> None:
        """Raise if requests are not being served.

        Raises:
            EngineDeadError: the engine has stopped.
            EngineStuckError: a step has been under way for more than ``stuck_after`` seconds.
        """
        self._thread.check(stuck_after)

    @property
    def num_streams(self) -> int:
        """Requests that the engine works on for somebody."""
        return self._thread.num_streams

    @property
    def errored(self) -> bool:
        """Whether the engine has stopped."""
        return self._thread.error is not None

    def get_tokenizer(self) -> Any:
        """The model's transformers tokenizer; None under ``skip_tokenizer_init``."""
        return self._engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation config asks for."""
        return self._engine.get_default_sampling_params()

    def memory_plan(self) -> MemoryPlan:
        """What memory is used for."""
        return self._engine.memory

    def methods(self) -> list[MethodRecord]:
        """The installed draft methods."""
        return self._engine.plugins.methods()

    @property
    def facts(self) -> EngineFacts:
        """What the engine is."""
        return EngineFacts.of(self._engine)

    @property
    def engine(self) -> LLMEngine:
        """For what does not change: what it was made from. The rest belongs to its thread: :meth:`call`."""
        return self._engine

    # -- the end --------------------------------------------------------------------------------
    def shutdown(self) -> None:
        """End all requests and free everything. May be called twice."""
        self._thread.close()
        self._door.shutdown()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.shutdown)


#: As scripts for vLLM call it.
AsyncLLMEngine = AsyncLLM
