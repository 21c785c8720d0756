"""One HTTP request that generates: from its admission to the line that is logged about it."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from ..api.outputs import RequestOutput
from ..api.params import SamplingParams
from ..api.prompts import TokenizedPrompt
from ..api.streams import RequestStream
from .errors import ApiError, error_of
from .protocol import Request as Body
from .service import Service
from .settings import ApiKey
from .streaming import outputs_of
from .usage import Usage


class Job:
    """An async context: what it queued is aborted when it is left early, and it is logged and traced."""

    def __init__(
        self, service: Service, body: Body, key: ApiKey | None, *, kind: str, headers: Mapping[str, str]
    ) -> None:
        """
        Args:
            kind: what its id begins with.
            headers: of the HTTP request: they may carry the trace that it belongs to.
        """
        self.service = service
        self.id = f"{kind}-{uuid.uuid4().hex}"
        self.model = service.model_called(body.model)
        self.created = int(time.time())
        self.usage = Usage()
        self.finish_reasons: dict[tuple[int, int], str] = {}  #: by prompt and completion
        self._body = body
        self._key = key
        self._headers = headers
        self._streams: list[RequestStream] = []
        self._began = time.perf_counter()
        self._first: float | None = None

    async def __aenter__(self) -> Job:
        self.service.opened()
        self._span = self.service.tracing.start(self._headers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in self._streams:
            stream.close()
        self.service.closed()
        self._tell(error)

    # -- the engine -----------------------------------------------------------------------------
    def salted(self, prompt: Mapping[str, Any]) -> dict[str, Any]:
        """``prompt`` in the name of its key: what is remembered of it is shown to nobody else's."""
        salts = [self._key.namespace] if self._key else []
        if self._body.cache_salt is not None:
            salts.append(self._body.cache_salt)
        return {**prompt, "cache_salt": "/".join(salts)} if salts else dict(prompt)

    def check_count(self, num_prompts: int) -> None:
        """Raise before the prompts are looked at.

        Raises:
            ApiError: there are more completions than a request may have.
        """
        most, n = self.service.settings.max_completions, self._body.n
        if num_prompts * n > most:
            message = f"n={n} of {num_prompts} prompts are more than the {most} completions of a request"
            raise ApiError(400, message)

    async def queue(self, prompts: Sequence[TokenizedPrompt], params: SamplingParams) -> None:
        """Hand the prompts to the engine.

        Raises:
            ConfigError: they cannot be served.
        """
        for number, prompt in enumerate(prompts):
            self._streams.append(
                await self.service.llm.add_request(
                    f"{self.id}-{number}",
                    prompt,
                    params,
                    priority=self._body.priority,
                    lora_request=self.service.adapters.get(self.model),
                )
            )

    async def outputs(
        self, trim: Callable[[RequestOutput], RequestOutput] | None = None
    ) -> AsyncIterator[tuple[int, RequestOutput]]:
        """What the engine gives, each with the number of its prompt.

        Args:
            trim: leaves out what is neither told nor counted.

        Raises:
            TimeoutError: it takes longer than the server allows.
            EngineDeadError: the engine has stopped.
        """
        async for number, output in outputs_of(self._streams, self.service.settings.request_timeout):
            if self._first is None:
                self._first = time.perf_counter()
            output = trim(output) if trim else output
            self.usage.add(output)
            yield number, output

    # -- what it tells --------------------------------------------------------------------------
    def head(self, kind: str) -> dict[str, Any]:
        """What every answer of it begins with; ``kind``: its ``object``."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _tell(self, error: BaseException | None) -> None:
        usage, now = self.usage, time.perf_counter()
        status = 200 if error is None else 499
        if isinstance(error, Exception):
            status = error_of(error).status
        facts = {
            "request_id": self.id,
            "model": self.model,
            "status": status,
            "key": self._key.namespace if self._key else None,
            "stream": self._body.stream,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "drafted_tokens": usage.total("drafted"),
            "accepted_tokens": usage.total("accepted"),
            "finish_reasons": sorted(set(self.finish_reasons.values())),
            "first_output_seconds": None if self._first is None else round(self._first - self._began, 6),
            "seconds": round(now - self._began, 6),
        }
        self.service.log_request(facts, error if status >= 500 else None)
        self._span.end(facts)
        for reason in self.finish_reasons.values():
            self.service.http.finished(reason)
