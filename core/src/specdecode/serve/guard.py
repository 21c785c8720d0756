"""Around all routes: how large a body may be, how long it may take, and what is counted of responses."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError
from .service import Service


class Guard:
    """ASGI middleware that neither reads ahead nor holds back, so that streams and disconnects pass it."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app: Any = app
        self.service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = False

        async def sending(message: Message) -> None:
            nonlocal began
            if message["type"] == "http.response.start":
                began = True
                route = scope.get("route")
                path = getattr(route, "path", "other")
                self.service.http.responded(path, message["status"])
            await send(message)

        try:
            self._check_length(scope)
        except ApiError as error:
            await error.response()(scope, receive, sending)
            return
        await self.app(scope, self._limited(receive), sending)

    def _check_length(self, scope: Scope) -> None:
        most = self.service.settings.max_body_bytes
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > most:
                raise self._too_large()

    def _too_large(self) -> ApiError:
        most = self.service.settings.max_body_bytes
        return ApiError(413, f"the body is larger than the {most} bytes that this server takes")

    def _limited(self, receive: Receive) -> Receive:
        """``receive``, which raises where a body is too large or too slow."""
        settings = self.service.settings
        size, complete = 0, False
        deadline = asyncio.get_running_loop().time() + settings.body_timeout

        async def limited() -> Message:
            nonlocal size, complete
            if complete:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, "the body did not arrive in time") from None
            size += len(message.get("body", b""))
            complete = message["type"] != "http.request" or not message.get("more_body", False)
            if size > settings.max_body_bytes:
                raise HTTPException(413, self._too_large().message)
            return message

        return limited
