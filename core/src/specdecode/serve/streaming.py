"""Answers as server-sent events, and requests whose client goes away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping, Sequence
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..api.outputs import RequestOutput
from ..api.streams import RequestStream
from .errors import encode_json

T = TypeVar("T")


class EventStream(Response):
    """Sends chunks as they come; a client that goes away ends them at once.

    Args:
        chunks: JSON values; it tells what goes wrong by a chunk, and is always closed.
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[Any, None], headers: Mapping[str, str] | None = None) -> None:
        # Proxies are asked not to collect the chunks.
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            with contextlib.suppress(ClientDisconnect):
                await unless_gone(receive, self._send_all(send))
        finally:
            await self._chunks.aclose()

    async def _send_all(self, send: Send) -> None:
        async for chunk in self._chunks:
            await _send(send, encode_json(chunk), more=True)
        await _send(send, b"[DONE]", more=False)


async def _send(send: Send, data: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": more})


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of ``work``, which is cancelled when the client goes away.

    Raises:
        ClientDisconnect: it went away.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


async def answered(request: Request, work: Awaitable[T]) -> T:
    """As :func:`unless_gone`, for the endpoints that answer as a whole."""
    return await unless_gone(request.receive, work)


async def outputs_of(
    streams: Sequence[RequestStream], timeout: float | None
) -> AsyncIterator[tuple[int, RequestOutput]]:
    """Outputs of several requests as they come, each with the number of its stream.

    Raises:
        TimeoutError: ``timeout`` seconds have passed.
    """
    loop = asyncio.get_running_loop()
    deadline = None if timeout is None else loop.time() + timeout
    if len(streams) == 1:  # no task for each output
        while True:
            async with asyncio.timeout_at(deadline):
                output = await anext(streams[0], None)
            if output is None:
                return
            yield 0, output
    waiting = {asyncio.ensure_future(anext(stream, None)): i for i, stream in enumerate(streams)}
    try:
        while waiting:
            left = None if deadline is None else max(0.0, deadline - loop.time())
            done, _ = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise TimeoutError
            for task in done:
                index = waiting.pop(task)
                if (output := task.result()) is not None:
                    waiting[asyncio.ensure_future(anext(streams[index], None))] = index
                    yield index, output
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
