"""OpenTelemetry spans of requests, where its API is installed and a provider is set up.

``opentelemetry-instrument specdecode serve ...`` does that from environment variables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Attributes of a span that OpenTelemetry's conventions have names for.
NAMES = {
    "model": "gen_ai.request.model",
    "request_id": "gen_ai.response.id",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "finish_reasons": "gen_ai.response.finish_reasons",
    "first_output_seconds": "gen_ai.server.time_to_first_token",
    "status": "http.response.status_code",
}
#: What the conventions have no name for.
PREFIX = "specdecode."


class Span:
    """A request in a trace; nothing if there are no traces."""

    def __init__(self, span: Any = None) -> None:
        self._span = span

    def end(self, facts: Mapping[str, Any]) -> None:
        """End it with what is known of the request."""
        if self._span is None:
            return
        for name, value in facts.items():
            if value is not None:
                self._span.set_attribute(NAMES.get(name, PREFIX + name), value)
        if facts["status"] >= 500:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()


class Tracing:
    """Makes spans; without OpenTelemetry, ones that do nothing."""

    def __init__(self) -> None:
        self._tracer: Any = None
        try:
            from opentelemetry import trace
        except ImportError:
            return
        self._tracer = trace.get_tracer("specdecode")

    def start(self, headers: Mapping[str, str]) -> Span:
        """A span of a request, within the trace that its headers name."""
        if self._tracer is None:
            return Span()
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind

        context = extract({name.lower(): value for name, value in headers.items()})
        return Span(self._tracer.start_span("llm_request", context=context, kind=SpanKind.SERVER))
