"""What all endpoints share: the engine, the settings, and who is being served."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..contract import ConfigError, SpecdecodeError
from ..engine.metrics import Metric
from .backend import Backend
from .errors import ApiError
from .metrics import HttpMetrics
from .settings import ServerSettings
from .tracing import Tracing

logger = logging.getLogger("specdecode.serve")

#: Seconds that /metrics waits for a step to end before it tells the last readings.
METRICS_PATIENCE = 2.0


class Service:
    """State of a running server; its methods are called in the event loop."""

    def __init__(self, llm: Backend, settings: ServerSettings) -> None:
        self.llm = llm
        self.settings = settings
        self.models = settings.served_model_name or (Path(llm.facts.model).name,)
        self.adapters = {adapter.lora_name: adapter for adapter in settings.adapters}
        if clash := self.adapters.keys() & set(self.models):
            raise ConfigError(f"adapter {clash.pop()!r} has the model's name: give it another one")
        self.created = int(time.time())
        self.http = HttpMetrics()
        self.tracing = Tracing()
        self.num_open = 0  #: HTTP requests that generate
        self._readings: Sequence[Metric] = ()

    def model_called(self, name: str | None) -> str:
        """The model's or adapter's name as a request has it.

        Raises:
            ApiError: there is no such model.
        """
        if name is None:
            return self.models[0]
        if name not in self.models and name not in self.adapters:
            known = ", ".join([*self.models, *self.adapters])
            message = f"model {name!r} is not served here; there is {known}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return name

    def opened(self) -> None:
        """Count a request.

        Raises:
            ApiError: there are as many as the server takes.
        """
        most = self.settings.max_waiting
        if most is not None and self.num_open >= most:
            raise ApiError(
                429,
                f"{self.num_open} requests are open, as many as this server takes: try again later",
                "rate_limit_error",
                code="too_many_requests",
                headers={"retry-after": "1"},
            )
        self.num_open += 1

    def closed(self) -> None:
        self.num_open -= 1

    async def readings(self) -> Sequence[Metric]:
        """The engine's metrics: those of before, if it is busy or has stopped."""
        try:
            self._readings = await asyncio.wait_for(self.llm.get_metrics(), METRICS_PATIENCE)
        except (TimeoutError, SpecdecodeError) as error:
            logger.warning("metrics are those of before: %s", error or "the engine is busy")
        return self._readings

    def log_request(self, facts: Mapping[str, Any], error: BaseException | None) -> None:
        """One line about a request that is over; ``error``: what went wrong in the server."""
        level = logging.INFO if error is None else logging.ERROR
        logger.log(level, "request", extra={"facts": facts}, exc_info=error)
