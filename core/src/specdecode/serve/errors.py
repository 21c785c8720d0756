"""Errors in OpenAI's shape."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ..api.engine_thread import EngineDeadError
from ..contract import ConfigError, SpecdecodeError
from .protocol import FIELDS, FIELDS_OF


@attrs.frozen
class ApiError(Exception):
    """What a client is told, and the status it is told with."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = attrs.field(factory=dict)

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        return json_response(self.body(), self.status, self.headers)


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode_json(content), status, headers, media_type="application/json")


def encode_json(content: Any) -> bytes:
    """JSON in UTF-8; half a surrogate pair, which a client may have sent, becomes a question mark."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


def error_of(error: BaseException) -> ApiError:
    """What to tell of an exception that ended a request."""
    match error:
        case ApiError():
            return error
        case ConfigError():
            return ApiError(400, "; ".join(error.faults), param=_field_of(error.faults))
        case EngineDeadError():
            return ApiError(503, str(error), "server_error", code="engine_dead")
        case TimeoutError():
            return ApiError(504, "the request took longer than the server allows", "timeout_error")
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), headers=error.headers or {})
        case SpecdecodeError():
            return ApiError(400, str(error))
    return ApiError(500, f"{type(error).__name__} in the server: see its log", "server_error")


def _field_of(faults: Sequence[str]) -> str | None:
    """The field that a message begins with."""
    found = re.match(r"[a-z_]+", faults[0]) if faults else None
    name = found.group() if found else None
    return name if name in FIELDS else None


def _told(fault: Mapping[str, Any], known: Sequence[str]) -> tuple[str, str | None]:
    """A fault that validation found: the message, and the field it is in; ``known``: those of the body."""
    place = [str(part) for part in fault["loc"][1:]]
    field = ".".join(place)
    if fault["type"] == "extra_forbidden":
        near = difflib.get_close_matches(field, known, n=1)
        remedy = f"; do you mean {near[0]!r}?" if near else ""
        return f"{field} is not a field that this server knows{remedy}", place[0]
    if fault["type"] == "json_invalid":
        return f"the body is not JSON: {fault.get('ctx', {}).get('error', 'it cannot be read')}", None
    if not place:
        return "the body must be a JSON object, sent as application/json", None
    return f"{field}: {fault['msg']}", place[0]


def install(app: FastAPI) -> None:
    """Have ``app`` tell every error in OpenAI's shape."""

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        known = FIELDS_OF.get(request.scope["route"].path, ())
        told = list(dict.fromkeys(_told(fault, known) for fault in error.errors()))
        messages = "; ".join(message for message, _ in told[:8])
        return ApiError(400, messages, param=told[0][1]).response()

    async def other(_: Request, error: Exception) -> Response:
        return error_of(error).response()

    app.add_exception_handler(RequestValidationError, invalid)
    for kind in (ApiError, SpecdecodeError, TimeoutError, HTTPException, Exception):
        app.add_exception_handler(kind, other)
