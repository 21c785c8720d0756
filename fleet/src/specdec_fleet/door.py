"""The door: core's HTTP application in an actor of Ray Serve, before the replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from ray import serve
from ray.serve.handle import DeploymentHandle
from specdecode.serve.app import make_app
from specdecode.serve.logs import log_to
from specdecode.serve.settings import ServerSettings

from .client import FleetLLM, Tolerance
from .messages import Whereabouts
from .replicas import ServeReplicas


class Door:
    """Answers HTTP requests. A connection lives as long as its door; replicas may come and go."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self,
        replicas: DeploymentHandle,
        settings: ServerSettings,
        tolerance: Tolerance,
        *,
        labelled: bool,
        log_format: Literal["text", "json"],
        log_level: str,
    ) -> None:
        """
        Args:
            labelled: tell the doors apart in metrics, there being several.
        """
        log_to(format=log_format, level=log_level)
        context = serve.get_replica_context()
        self._llm = await FleetLLM.connect(ServeReplicas(replicas), tolerance, rank=context.rank.rank)
        labels = {"door": context.replica_id.unique_id} if labelled else None
        self._app = make_app(self._llm, settings, metric_labels=labels)

    def __serve_build_asgi_app__(self) -> Any:
        """Asked for by ``serve.ingress`` once the door is made."""
        return self._app

    async def whereabouts(self) -> Sequence[Whereabouts]:
        """Where the replicas run."""
        return await self._llm.whereabouts()

    async def __del__(self) -> None:
        if hasattr(self, "_llm"):
            await self._llm.shutdown()
