"""Tokens of a request: OpenAI's counts, and what speculation did."""

from __future__ import annotations

from typing import Any

import attrs

from ..api.outputs import RequestMetrics, RequestOutput


@attrs.define
class Usage:
    """Adds up the outputs of an HTTP request, whose prompts are engine requests of their own."""

    num_prompts: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    _metrics: dict[str, RequestMetrics] = attrs.field(factory=dict)  # by engine request; each is a total

    def add(self, output: RequestOutput) -> None:
        """Count an output: its new tokens, and its prompt if it is the request's first."""
        if output.request_id not in self._metrics:
            self.num_prompts += 1
            self.prompt_tokens += len(output.prompt_token_ids)
            self.cached_tokens += output.num_cached_tokens
        self.completion_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        if output.metrics is not None:
            self._metrics[output.request_id] = output.metrics

    @property
    def metrics(self) -> list[RequestMetrics]:
        return list(self._metrics.values())

    def total(self, field: str) -> int:
        """Sum of a count of :class:`RequestMetrics`."""
        return sum(getattr(metrics, field) for metrics in self._metrics.values())

    def body(self) -> dict[str, Any]:
        """``usage`` as the API has it, with ``speculation`` beside it."""
        steps = self.total("draft_steps")
        gained = self.total("accepted") + self.total("bonus")
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "speculation": {
                "drafted_tokens": self.total("drafted"),
                "accepted_tokens": self.total("accepted"),
                "draft_steps": steps,
                "steps": self.total("steps"),
                "acceptance_length": round(gained / steps, 3) if steps else None,
            },
        }
