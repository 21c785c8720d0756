"""The one thread that touches an engine: takes requests between two steps, and hands their outputs out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import attrs

from ..contract import ConfigError, SpecdecodeError
from ..distributed.errors import WorkerDied
from ..lora.request import LoRARequest
from ..models import NewWeights
from .engine import LLMEngine
from .outputs import RequestOutput
from .params import SamplingParams
from .prompts import TokenizedPrompt
from .streams import RequestStream
from .updating import UpdateMode, WeightsLostError, WeightUpdate

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Steps that may fail one after the other before the engine is given up.
MAX_FAILURES = 3


class EngineDeadError(SpecdecodeError):
    """The engine has stopped; every request that waited for it ends with this."""


class EngineStuckError(SpecdecodeError):
    """A step takes longer than any should."""


@attrs.frozen(eq=False)
class Command:
    """Something to do between two steps; ``lost`` instead, if the engine stops before."""

    run: Callable[[], None]
    lost: Callable[[EngineDeadError], None] | None = None


@attrs.frozen(eq=False)
class Update:
    """New weights that wait for the requests that were there before them."""

    new: NewWeights
    mode: UpdateMode
    done: Future[WeightUpdate]


class EngineThread:
    """Runs an engine; all methods may be called from any thread.

    A step that raises is tried again, as :meth:`LLMEngine.step` allows; after :data:`MAX_FAILURES` in
    a row the engine is given up, and with it every request.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._inbox: deque[Command] = deque()
        self._news = threading.Condition()
        self._streams: dict[str, RequestStream] = {}  # of the thread alone
        self._updates: deque[Update] = deque()
        self._held: dict[RequestStream, Callable[[], None]] = {}  # requests that wait for an update
        self._paused = False
        self._closing = False
        self._failures = 0
        self._busy_since: float | None = None
        self.error: EngineDeadError | None = None  #: why it has stopped
        self._thread = threading.Thread(target=self._run, name="specdecode-engine", daemon=True)
        self._thread.start()

    # -- from any thread ------------------------------------------------------------------------
    def submit(
        self,
        stream: RequestStream,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> None:
        """Queue a request; what it gives, or why it cannot be queued, comes through ``stream``.

        Raises:
            EngineDeadError: the engine has stopped.
        """

        def add() -> None:
            try:
                self._engine.add_request(
                    stream.request_id, prompt, params, priority=priority, lora_request=lora_request
                )
            except Exception as error:
                self._fail([stream], error)
            else:
                self._streams[stream.request_id] = stream

        def begin() -> None:
            if self._updates:
                self._held[stream] = add
            else:
                add()

        self._post(Command(begin, lambda error: self._fail([stream], error)))

    def abort(self, stream: RequestStream) -> None:
        """End the request of ``stream``, which nobody reads any more; nothing if it has ended."""

        def end() -> None:
            self._held.pop(stream, None)
            if self._streams.get(stream.request_id) is stream:
                del self._streams[stream.request_id]
                self._engine.abort_request(stream.request_id)

        with contextlib.suppress(EngineDeadError):
            self._post(Command(end))

    def end(self, request_ids: Iterable[str]) -> None:
        """End requests; their streams get a last output with ``finish_reason="abort"``."""
        names = set(request_ids)

        def end() -> None:
            self._let_in([stream for stream in self._held if stream.request_id in names])
            self._abort(names)

        with contextlib.suppress(EngineDeadError):
            self._post(Command(end))

    def call(self, function: Callable[[LLMEngine], T]) -> Future[T]:
        """Run ``function`` between two steps.

        Raises:
            EngineDeadError: the engine has stopped; in the future, if it stops meanwhile.
        """
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(self._engine))
            except Exception as error:
                future.set_exception(error)

        def lost(error: EngineDeadError) -> None:
            if not future.done():
                future.set_exception(error)

        self._post(Command(run, lost))
        return future

    def update(self, new: NewWeights, mode: UpdateMode) -> Future[WeightUpdate]:
        """Replace the weights, as :meth:`AsyncLLM.update_weights` tells.

        Raises:
            EngineDeadError: the engine has stopped; in the future, if it stops meanwhile.
        """
        update = Update(new, mode, Future())

        def begin() -> None:
            if mode == "abort":
                self._abort(self._streams)
            elif mode == "wait" and self._paused and self._streams:
                update.done.set_exception(
                    ConfigError(
                        f"mode='wait' waits for {len(self._streams)} requests, and the engine sleeps: wake "
                        "it up, or use mode='keep' or 'abort'"
                    )
                )
                return
            self._updates.append(update)

        self._post(Command(begin, update.done.set_exception))
        return update.done

    def pause(self, paused: bool) -> Future[None]:
        """Take no more steps, or go on; requests stay as they are."""

        def turn(_: LLMEngine) -> None:
            self._paused = paused

        return self.call(turn)

    @property
    def paused(self) -> bool:
        """Whether no steps are taken for now."""
        return self._paused

    @property
    def num_streams(self) -> int:
        """Requests that run or wait in the engine."""
        return len(self._streams) + len(self._held)

    @property
    def busy_seconds(self) -> float:
        """How long the step under way has taken; 0 between steps."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def check(self, stuck_after: float) -> None:
        """Raise if requests are not being served.

        Raises:
            EngineDeadError: the engine has stopped.
            EngineStuckError: a step has been under way for more than ``stuck_after`` seconds.
        """
        if self.error is not None:
            raise self.error
        if (seconds := self.busy_seconds) > stuck_after:
            raise EngineStuckError(f"the engine's step has been under way for {seconds:.0f} seconds")

    def close(self) -> None:
        """End all requests and free the engine. May be called twice."""
        with self._news:
            self._closing = True
            self._news.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _post(self, command: Command) -> None:
        with self._news:
            if self.error is not None:
                raise self.error
            self._inbox.append(command)
            self._news.notify()

    # -- in the thread --------------------------------------------------------------------------
    def _run(self) -> None:
        error: BaseException | None = None
        try:
            while self._wait():
                self._busy_since = time.monotonic()
                while self._inbox:
                    self._inbox.popleft().run()
                while self._may_update():
                    self._update(self._updates.popleft())
                if self._may_step():
                    self._step()
        except BaseException as reason:
            logger.critical("the engine has stopped", exc_info=reason)
            error = reason
        self._end(error)

    def _wait(self) -> bool:
        """Wait for something to do; False when it is to end."""
        self._busy_since = None
        with self._news:
            while not (self._closing or self._inbox or self._may_update() or self._may_step()):
                self._news.wait()
            return not self._closing

    def _may_step(self) -> bool:
        return not self._paused and self._engine.has_unfinished_requests()

    def _may_update(self) -> bool:
        return bool(self._updates) and (self._updates[0].mode != "wait" or not self._streams)

    def _update(self, update: Update) -> None:
        if update.done.set_running_or_notify_cancel():
            try:
                update.done.set_result(self._engine.apply_weights(update.new))
            except Exception as error:
                update.done.set_exception(error)
                if isinstance(error, WeightsLostError | WorkerDied):
                    raise
        if not self._updates:
            self._let_in(list(self._held))

    def _let_in(self, streams: Sequence[RequestStream]) -> None:
        for stream in streams:
            self._held.pop(stream)()

    def _abort(self, request_ids: Iterable[str]) -> None:
        self._hand_out(self._engine.abort_request(list(request_ids)))

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except WorkerDied:
            raise  # no second try brings it back
        except Exception:
            self._failures += 1
            if self._failures >= MAX_FAILURES:
                raise
            logger.exception("a step failed and is tried again (%d of %d)", self._failures, MAX_FAILURES)
            return
        self._failures = 0
        self._hand_out(outputs)

    def _hand_out(self, outputs: Sequence[RequestOutput]) -> None:
        """Give outputs to their streams, all of one event loop at once."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[RequestStream, RequestOutput]]] = {}
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue  # nobody's: its reader has just gone
            if output.finished:
                del self._streams[output.request_id]
            by_loop.setdefault(stream.loop, []).append((stream, output))
        for loop, pairs in by_loop.items():
            if not _call(loop, _put, pairs):
                self._engine.abort_request([stream.request_id for stream, _ in pairs])

    def _end(self, reason: BaseException | None) -> None:
        """Tell everybody that waits, and free the engine."""
        told = "it was shut down" if reason is None else f"{type(reason).__name__}: {reason}"
        error = EngineDeadError(f"the engine has stopped ({told}): the request was not completed")
        error.__cause__ = reason
        with self._news:
            self.error = error
            left, self._inbox = self._inbox, deque()
        self._busy_since = None
        for command in left:
            if command.lost is not None:
                command.lost(error)
        for update in self._updates:
            update.done.set_exception(error)
        self._fail([*self._streams.values(), *self._held], error)
        self._streams.clear()
        self._held.clear()
        try:
            self._engine.shutdown()
        except Exception:
            logger.exception("freeing the engine raised")

    @staticmethod
    def _fail(streams: Iterable[RequestStream], error: BaseException) -> None:
        for stream in streams:
            _call(stream.loop, stream.fail, error)


def _put(pairs: Sequence[tuple[RequestStream, RequestOutput]]) -> None:
    for stream, output in pairs:
        stream.put(output)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., Any], *args: Any) -> bool:
    """Call in the thread of ``loop``; False if that is closed, so that nobody is left to tell."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise
        return False
    return True
