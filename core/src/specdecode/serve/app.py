"""The routes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from importlib.resources import files
from typing import Annotated, Any

import attrs
from fastapi import Depends, FastAPI, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from .. import __version__
from ..contract import SpecdecodeError
from . import errors
from .backend import Backend
from .chat import Chat
from .completions import Completion
from .errors import ApiError, error_of, json_response
from .guard import Guard
from .job import Job
from .metrics import CONTENT_TYPE, render
from .protocol import ChatRequest, CompletionRequest, WeightsRequest
from .protocol import Request as Body
from .service import Service
from .settings import ApiKey, ServerSettings
from .streaming import EventStream, answered
from .structure import told_by_its_field

logger = logging.getLogger(__name__)

_bearer = HTTPBearer(auto_error=False, description="An API key, where the server has any.")
Bearer = Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]

#: What ``/specdecode/info`` tells of the target.
TARGET_FACTS = ("dtype", "device", "max_model_len", "vocab_size")

#: What every endpoint behind a key may answer.
_REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"description": what}
    for status, what in (
        (400, "The request cannot be served; the message says what to change"),
        (401, "No API key, or a wrong one"),
        (404, "No such model"),
        (408, "The body did not arrive in time"),
        (413, "The body is too large"),
        (429, "Too many requests are open"),
        (503, "The engine has stopped"),
        (504, "The request took too long"),
    )
}


def make_app(
    llm: Backend,
    settings: ServerSettings | None = None,
    *,
    metric_labels: Mapping[str, str] | None = None,
) -> FastAPI:
    """The ASGI application that serves ``llm``, which its owner shuts down.

    Args:
        metric_labels: what all metrics are labelled with beside the model's name, where several
            servers are scraped as one.
    """
    service = Service(llm, settings or ServerSettings())
    app = FastAPI(title="specdecode", version=__version__, docs_url=None, redoc_url=None)
    app.state.service = service
    errors.install(app)
    _add_generation(app, service)
    _add_models(app, service)
    _add_operation(app, service, {"engine": "0", **(metric_labels or {})})
    if service.settings.admin_key is not None:
        _add_administration(app, service, service.settings.admin_key)
    app.add_middleware(Guard, service=service)
    return app


def _key_check(settings: ServerSettings) -> Callable[..., Awaitable[ApiKey | None]]:
    async def check(request: Request, _: Bearer) -> ApiKey | None:
        key = settings.key_of(request.headers.get("authorization"))
        if settings.api_keys and key is None:
            raise _no_key("an API key")
        return key

    return check


def _no_key(what: str) -> ApiError:
    return ApiError(
        401,
        f"{what} is wanted: send 'Authorization: Bearer KEY'",
        "authentication_error",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


# -- /v1 --------------------------------------------------------------------------------------------
def _add_generation(app: FastAPI, service: Service) -> None:
    caller = Depends(_key_check(service.settings))

    @app.post("/v1/completions", responses=_REFUSALS, tags=["OpenAI"])
    async def completions(body: CompletionRequest, request: Request, key: ApiKey | None = caller) -> Response:
        job = Job(service, body, key, kind="cmpl", headers=request.headers)
        return await _answer(job, Completion(job, body), body, request)

    @app.post("/v1/chat/completions", responses=_REFUSALS, tags=["OpenAI"])
    async def chat_completions(body: ChatRequest, request: Request, key: ApiKey | None = caller) -> Response:
        job = Job(service, body, key, kind="chatcmpl", headers=request.headers)
        return await _answer(job, Chat(job, body), body, request)


async def _answer(job: Job, answer: Completion | Chat, body: Body, request: Request) -> Response:
    headers = {"x-request-id": job.id}
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options wants stream=true", param="stream_options")
    if body.stream:
        chunks = _stream(job, answer, body)
        try:
            await answered(request, anext(chunks))  # it is queued now, or refused
        except ClientDisconnect:
            await chunks.aclose()
            return Response(status_code=499)
        return EventStream(chunks, headers)

    async def whole() -> Any:
        async with job:
            with told_by_its_field(body):
                await answer.begin()
            return await answer.whole()

    try:
        return json_response(await answered(request, whole()), headers=headers)
    except ClientDisconnect:
        return Response(status_code=499)  # to nobody


async def _stream(job: Job, answer: Completion | Chat, body: Body) -> AsyncGenerator[Any, None]:
    """None when the request is queued, then the chunks; what goes wrong from then on is the last one."""
    options = body.stream_options
    begun = False
    try:
        async with job:
            with told_by_its_field(body):
                await answer.begin()
            begun = True
            yield None
            async with contextlib.aclosing(answer.chunks()) as chunks:
                async for chunk in chunks:
                    if options is not None and options.continuous_usage_stats:
                        chunk["usage"] = job.usage.body()
                    yield chunk
            if options is not None and options.include_usage:
                kind = "chat.completion.chunk" if isinstance(answer, Chat) else "text_completion"
                yield {**job.head(kind), "choices": [], "usage": job.usage.body()}
    except Exception as error:
        if not begun:
            raise
        yield error_of(error).body()


def _add_models(app: FastAPI, service: Service) -> None:
    check = Depends(_key_check(service.settings))

    def model(name: str) -> dict[str, Any]:
        adapter = service.adapters.get(name)
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "specdecode",
            "root": service.llm.facts.model if adapter is None else adapter.lora_path,
            "parent": None if adapter is None else service.models[0],
            "max_model_len": service.llm.facts.max_model_len,
        }

    @app.get("/v1/models", dependencies=[check], responses=_REFUSALS, tags=["OpenAI"])
    async def models() -> Response:
        return json_response(
            {"object": "list", "data": [model(name) for name in (*service.models, *service.adapters)]}
        )

    @app.get("/v1/models/{name:path}", dependencies=[check], responses=_REFUSALS, tags=["OpenAI"])
    async def one_model(name: str) -> Response:
        return json_response(model(service.model_called(name)))


# -- looking in -------------------------------------------------------------------------------------
def _add_operation(app: FastAPI, service: Service, metric_labels: Mapping[str, str]) -> None:
    check = Depends(_key_check(service.settings))
    page = files(__package__).joinpath("page/index.html").read_text(encoding="utf-8")

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return HTMLResponse(page)

    failing: dict[int | str, dict[str, Any]] = {503: {"description": "The engine has stopped, or hangs"}}

    @app.get("/health", responses=failing, tags=["operation"])
    async def health() -> Response:
        try:
            await service.llm.check_health(service.settings.stuck_after)
        except SpecdecodeError as error:
            return json_response({"status": "failing", "reason": str(error)}, 503)
        status = "sleeping" if await service.llm.is_sleeping() else "ok"
        return json_response({"status": status, "open_requests": service.num_open})

    @app.get("/metrics", response_class=PlainTextResponse, tags=["operation"])
    async def metrics() -> Response:
        readings = [*await service.readings(), *service.http.readings()]
        labels = {"model_name": service.models[0], **metric_labels}
        return Response(render(readings, labels), media_type=CONTENT_TYPE)

    @app.get("/version", tags=["operation"])
    async def version() -> Response:
        return json_response({"version": __version__})

    @app.get("/specdecode/info", dependencies=[check], responses=_REFUSALS, tags=["operation"])
    async def info() -> Response:
        """What is served: the model, how it speculates, and what memory is used for."""
        facts = service.llm.facts
        return json_response(
            {
                "models": list(service.models),
                "method": facts.method,
                "num_speculative_tokens": facts.num_speculative_tokens,
                "target": {name: getattr(facts, name) for name in TARGET_FACTS},
                "memory": {**attrs.asdict(facts.memory), "kv_bytes": facts.memory.kv_bytes},
            }
        )


# -- administration ---------------------------------------------------------------------------------
def _add_administration(app: FastAPI, service: Service, key: ApiKey) -> None:
    async def check(request: Request, _: Bearer) -> None:
        keys = ServerSettings(api_keys=(key,))
        if keys.key_of(request.headers.get("authorization")) is None:
            raise _no_key("the admin key")

    checked: Sequence[Any] = [Depends(check)]

    @app.post("/reset_prefix_cache", dependencies=checked, responses=_REFUSALS, tags=["administration"])
    async def reset_prefix_cache() -> Response:
        """Forget cached prefixes; refused while requests run."""
        if not await service.llm.reset_prefix_cache():
            raise ApiError(409, "requests run: the prefix cache is reset when there are none")
        return json_response({"reset": True})

    @app.post("/update_weights", dependencies=checked, responses=_REFUSALS, tags=["administration"])
    async def update_weights(body: WeightsRequest) -> Response:
        """Replace the model's weights by those of another checkpoint of its shape, in place."""
        return json_response(attrs.asdict(await service.llm.update_weights(body.model, mode=body.mode)))

    @app.post("/sleep", dependencies=checked, responses=_REFUSALS, tags=["administration"])
    async def sleep(level: int = 0) -> Response:
        """Take no steps until woken up; requests wait."""
        await service.llm.sleep(level)
        return json_response({"is_sleeping": True})

    @app.post("/wake_up", dependencies=checked, responses=_REFUSALS, tags=["administration"])
    async def wake_up() -> Response:
        """Go on."""
        await service.llm.wake_up()
        return json_response({"is_sleeping": False})

    @app.get("/is_sleeping", dependencies=checked, responses=_REFUSALS, tags=["administration"])
    async def is_sleeping() -> Response:
        return json_response({"is_sleeping": await service.llm.is_sleeping()})
