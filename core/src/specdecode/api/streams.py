"""The outputs of one request on their way from the engine's thread to a coroutine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import chain

import attrs

from .outputs import CompletionOutput, RequestOutput
from .params import RequestOutputKind


class RequestStream:
    """An async iterator over the outputs of one request; ends after the finished one.

    A consumer that is slower than the engine gets several steps' outputs as one, so that what waits
    here never grows beyond one output.
    """

    def __init__(
        self, request_id: str, kind: RequestOutputKind, abort: Callable[[RequestStream], None]
    ) -> None:
        """
        Args:
            kind: of the request's outputs.
            abort: ends the request in the engine.
        """
        self.request_id = request_id
        self.loop = asyncio.get_running_loop()
        self._kind = kind
        self._abort = abort
        self._news = asyncio.Event()
        self._waiting: RequestOutput | None = None
        self._error: BaseException | None = None
        self._ended = False  # nothing more will come
        self._closed = False  # nobody reads any more

    def put(self, output: RequestOutput) -> None:
        """Take an output, in the thread of ``loop``."""
        if self._ended:
            return
        if self._waiting is not None and self._kind is RequestOutputKind.DELTA:
            output = joined(self._waiting, output)
        self._waiting = output
        self._ended = output.finished
        self._news.set()

    def fail(self, error: BaseException) -> None:
        """End with ``error``, in the thread of ``loop``; what came before is still given out."""
        if not self._ended:
            self._error, self._ended = error, True
            self._news.set()

    def close(self) -> None:
        """Stop reading: a request that still runs is aborted, one that has finished is not."""
        if not self._closed:
            self._closed = True
            if not self._ended:
                self._abort(self)
            self._news.set()

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._news.is_set():
            if self._ended or self._closed:
                raise StopAsyncIteration
            await self._news.wait()
        self._news.clear()
        output, self._waiting = self._waiting, None
        if output is not None:
            if self._error is not None:
                self._news.set()
            return output
        error, self._error = self._error, None
        if error is None:
            raise StopAsyncIteration
        raise error


def joined(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Two outputs of a request under ``DELTA`` that follow each other, as one."""
    return attrs.evolve(
        second,
        outputs=[_joined(a, b) for a, b in zip(first.outputs, second.outputs, strict=True)],
        prompt_logprobs=first.prompt_logprobs if second.prompt_logprobs is None else second.prompt_logprobs,
    )


def _joined(first: CompletionOutput, second: CompletionOutput) -> CompletionOutput:
    logprobs = second.logprobs
    if first.logprobs is not None and second.logprobs is not None:
        logprobs = [*first.logprobs, *second.logprobs]
    return attrs.evolve(
        second,
        text=first.text + second.text,
        token_ids=list(chain(first.token_ids, second.token_ids)),
        logprobs=logprobs,
        token_sources=list(chain(first.token_sources, second.token_sources)),
    )
