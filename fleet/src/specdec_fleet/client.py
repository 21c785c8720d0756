"""FleetLLM: what AsyncLLM is for one engine, for all replicas of a fleet."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, TypeVar

import attrs
from specdecode import LoRARequest, RequestOutput, SamplingParams
from specdecode.api.door import Door
from specdecode.api.engine_thread import EngineDeadError
from specdecode.api.facts import EngineFacts
from specdecode.api.prompts import TokenizedPrompt
from specdecode.api.streams import RequestStream
from specdecode.api.updating import UpdateMode, WeightUpdate
from specdecode.contract import ConfigError, SpecdecodeError
from specdecode.engine.metrics import Counter, Gauge, Metric
from specdecode.models import WeightSource
from specdecode.sampling import UnseededStream, resolve_seed

from .continuing import Continuation
from .errors import ReplicaLost, RequestLostError
from .messages import Accepted, Ask, Description, Question, Whereabouts
from .replicas import Replicas

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds that replicas have to answer about themselves: less than the server waits for metrics.
LOOK_TIMEOUT = 1.5
#: Seconds that replicas have to do what an administrator asks for, between two steps.
CONTROL_TIMEOUT = 30.0
#: Seconds before the next attempt, times the attempts made: what broke one replica may be breaking the next.
PAUSE = 0.05
#: Replicas that are remembered as lost.
MAX_SHUNNED = 64


@attrs.frozen(kw_only=True)
class Tolerance:
    """What a request puts up with."""

    retries: int  #: attempts after the first one; then it ends with :class:`RequestLostError`
    patience: float  #: seconds that it waits for a replica to take it
    silence: float  #: seconds after which a replica that says nothing, not even that it lives, counts as lost


class FleetLLM:
    """A :class:`~specdecode.serve.backend.Backend` over many engines. It lives in one event loop.

    A request whose replica is lost is computed again by another one. Each gets its seed here, so that
    the tokens are the same there, and a reader is given what it does not have yet.

    Args:
        description: of the replicas.
        rank: which door this is, so that no two draw the same seeds.
    """

    def __init__(
        self, replicas: Replicas, description: Description, tolerance: Tolerance, *, rank: int = 0
    ) -> None:
        self._replicas = replicas
        self._description = description
        self._tolerance = tolerance
        self._unseeded = UnseededStream(description.facts.seed + rank)
        self._door = Door()
        self._running: set[asyncio.Task[None]] = set()
        self._shunned: dict[str, float] = {}  # replica -> until when, by the event loop's clock
        self._num_retries = 0
        self._num_lost = 0

    @classmethod
    async def connect(cls, replicas: Replicas, tolerance: Tolerance, *, rank: int = 0) -> FleetLLM:
        """Wait for a replica, and ask it what they all are."""
        while True:
            try:
                async with asyncio.timeout(tolerance.patience):
                    description = await replicas.call("describe")
            except (ReplicaLost, TimeoutError) as error:
                logger.warning("waiting for a replica: %s", error or "none answers")
                await asyncio.sleep(PAUSE)
            else:
                return cls(replicas, description, tolerance, rank=rank)

    # -- what the replicas are ------------------------------------------------------------------
    @property
    def facts(self) -> EngineFacts:
        return self._description.facts

    def get_tokenizer(self) -> Any:
        return self._description.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        return self._description.defaults.clone()

    # -- requests -------------------------------------------------------------------------------
    async def at_the_door(self, function: Callable[[], T], *, long: bool = False) -> T:
        """As :meth:`specdecode.AsyncLLM.at_the_door`."""
        return await self._door.run(function, long=long)

    async def prepare(self, prompt: Any, params: SamplingParams, *, where: str = "prompt") -> TokenizedPrompt:
        """As :meth:`specdecode.AsyncLLM.prepare`, by some replica.

        Raises:
            ConfigError: names the field, the value and the remedy.
            RequestLostError: no replica answers.
        """
        if isinstance(prompt, TokenizedPrompt):
            return prompt
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._tolerance.patience
        while loop.time() < deadline:
            question = Question(prompt=prompt, params=params, where=where, avoid=self._avoided())
            with contextlib.suppress(ReplicaLost, TimeoutError):  # it may be asked again and again
                async with asyncio.timeout(min(self._tolerance.silence, deadline - loop.time())):
                    return await self._replicas.call("prepare", question)
            await asyncio.sleep(PAUSE)
        raise self._nobody()

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        lora_request: LoRARequest | None = None,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """As :meth:`specdecode.AsyncLLM.generate`.

        Raises:
            ConfigError: the request cannot be served.
            RequestLostError: no replica completed it.
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
        """Hand a request to a replica, and wait until it has accepted it.

        Raises:
            ConfigError: the replica refuses it.
            RequestLostError: no replica takes it.
        """
        tokenized = await self.prepare(prompt, params)
        seed = resolve_seed(params.seed, self._unseeded)
        ask = Ask(
            request_id=request_id,
            prompt=tokenized,
            params=params.clone(seed=seed),
            priority=priority,
            lora_request=lora_request,
        )
        loop = asyncio.get_running_loop()
        accepted: asyncio.Future[None] = loop.create_future()

        def abort(_: RequestStream) -> None:
            task.cancel()

        stream = RequestStream(request_id, params.output_kind, abort)
        task = loop.create_task(self._serve(ask, stream, accepted))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            await accepted
        except BaseException:
            stream.close()
            raise
        return stream

    async def _serve(self, ask: Ask, stream: RequestStream, accepted: asyncio.Future[None]) -> None:
        """Fill ``stream``, over as many attempts as it takes and there are."""
        try:
            await self._attempt_all(ask, stream, accepted)
        except asyncio.CancelledError:  # nobody reads it any more, or the door is shut
            accepted.cancel()
            stream.fail(EngineDeadError("the door was shut: the request was not completed"))
            raise
        except Exception as error:
            if accepted.done():
                stream.fail(error)
            else:
                accepted.set_exception(error)

    async def _attempt_all(self, ask: Ask, stream: RequestStream, accepted: asyncio.Future[None]) -> None:
        told = Continuation(ask.params.output_kind)
        for attempt in range(self._tolerance.retries + 1):
            try:
                await self._attempt(ask, told, stream, accepted)
                return
            except ReplicaLost as error:
                lost = error
            if attempt < self._tolerance.retries:
                self._num_retries += 1
                logger.warning(
                    "request %s goes on with another replica, %d tokens having been sent: %s",
                    ask.request_id,
                    told.num_tokens,
                    lost,
                )
                told.begin_again()
                await asyncio.sleep(PAUSE * attempt)
        raise self._given_up(lost)

    async def _attempt(
        self, ask: Ask, told: Continuation, stream: RequestStream, accepted: asyncio.Future[None]
    ) -> None:
        """One replica's answer, from its beginning to its end."""
        replica, finished = "", False
        messages = self._replicas.generate(attrs.evolve(ask, avoid=self._avoided()))
        try:
            replica = await self._accepted(messages)
            if not accepted.done():
                accepted.set_result(None)
            prompt_ids = list(ask.prompt.token_ids)
            while (message := await self._next(messages)) is not None:
                if not isinstance(message, RequestOutput):
                    continue  # a pulse
                if (new := told.take(message)) is not None:
                    stream.put(attrs.evolve(new, prompt=ask.prompt.text, prompt_token_ids=prompt_ids))
                finished = message.finished
            if not finished:
                raise ReplicaLost("the replica ended before the request")
        except ReplicaLost as error:
            self._shun(replica, error.shunned)
            if not finished:
                raise
        finally:
            await messages.aclose()

    async def _accepted(self, messages: AsyncGenerator[Any, None]) -> str:
        """The name of the replica that has accepted a request."""
        try:
            async with asyncio.timeout(self._tolerance.patience):
                first = await anext(messages, None)
        except TimeoutError:
            raise self._nobody() from None
        if not isinstance(first, Accepted):
            raise ReplicaLost("the replica did not accept the request")
        return first.replica

    async def _next(self, messages: AsyncGenerator[Any, None]) -> Any:
        """What the replica says next; None: nothing more."""
        try:
            async with asyncio.timeout(self._tolerance.silence):
                return await anext(messages, None)
        except TimeoutError:
            reason = f"the replica was silent for {self._tolerance.silence:g} seconds"
            raise ReplicaLost(reason, shunned=2 * self._tolerance.silence) from None

    def _shun(self, replica: str, seconds: float) -> None:
        if replica and seconds:
            self._shunned[replica] = asyncio.get_running_loop().time() + seconds
            while len(self._shunned) > MAX_SHUNNED:
                del self._shunned[next(iter(self._shunned))]

    def _avoided(self) -> frozenset[str]:
        now = asyncio.get_running_loop().time()
        return frozenset(replica for replica, until in self._shunned.items() if until > now)

    def _given_up(self, lost: ReplicaLost) -> RequestLostError:
        self._num_lost += 1
        attempts = self._tolerance.retries + 1
        times = "once" if attempts == 1 else f"{attempts} times"
        return RequestLostError(
            f"the request was tried {times} and its replica was lost each time, the last one by: {lost}"
        )

    def _nobody(self) -> RequestLostError:
        self._num_lost += 1
        return RequestLostError(f"no replica took the request within {self._tolerance.patience:g} seconds")

    # -- operation ------------------------------------------------------------------------------
    async def check_health(self, stuck_after: float) -> None:
        """Raise if no replica is well; each looks by itself whether its engine hangs.

        Raises:
            EngineDeadError: there is none.
        """
        if not await self._all("check_health"):
            raise EngineDeadError("no replica is well; Ray Serve starts them again where there is room")

    async def get_metrics(self) -> list[Metric]:
        """Those of all replicas, labelled ``replica``, and the door's own."""
        answers = await self._all("metrics")
        of_replicas = [
            attrs.evolve(metric, labels={**metric.labels, "replica": name})
            for name, metrics in sorted(answers, key=lambda answer: answer[0])
            for metric in metrics
        ]
        return [
            Gauge(name="specdecode:replicas", reading=len(answers)),
            Counter(name="specdecode:request_retries", total=self._num_retries),
            Counter(name="specdecode:requests_lost", total=self._num_lost),
            *of_replicas,
        ]

    async def whereabouts(self) -> Sequence[Whereabouts]:
        """Where the replicas run."""
        return await self._all("whereabouts")

    async def reset_prefix_cache(self) -> bool:
        """Of all replicas; False if requests run on one."""
        return all(await self._all("reset_prefix_cache", timeout=CONTROL_TIMEOUT))

    async def update_weights(self, source: WeightSource, *, mode: UpdateMode = "wait") -> WeightUpdate:
        """Refused: a replica that is replaced would come up with the weights of the start.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "model: the weights of a fleet are not replaced while it runs, since a replica that is started "
            "in the place of a lost one would have the old ones: start the fleet again with the new model"
        )

    async def sleep(self, level: int = 0) -> None:
        """Pause all replicas that there are.

        Raises:
            SpecdecodeError: no replica did, as they do for no other ``level``.
        """
        await self._control("sleep", level)

    async def wake_up(self) -> None:
        await self._control("wake_up")

    async def is_sleeping(self) -> bool:
        """Whether all replicas are."""
        answers = await self._all("is_sleeping")
        return bool(answers) and all(answers)

    async def _all(self, method: str, *args: Any, timeout: float = LOOK_TIMEOUT) -> Sequence[Any]:
        return await self._replicas.broadcast(method, *args, timeout=timeout)

    async def _control(self, method: str, *args: Any) -> None:
        if not await self._all(method, *args, timeout=CONTROL_TIMEOUT):
            raise SpecdecodeError(f"{method} was done by no replica: see the door's log for the reason")

    async def shutdown(self) -> None:
        """End what runs; the replicas are Ray Serve's."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._door.shutdown(wait=False)
