"""What the choices of both endpoints have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..api.outputs import CompletionOutput
from ..api.segments import DraftMarker


class Sources:
    """Which pieces of a completion's text came as accepted drafts, as it goes on."""

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int]) -> None:
        self._marker = DraftMarker(tokenizer, prompt_ids)

    def take(self, completion: CompletionOutput) -> list[dict[str, str]]:
        """Of what ``completion`` adds."""
        pieces = self._marker.segments(completion, last=completion.finished())
        return [{"text": one.text, "source": "draft" if one.drafted else "target"} for one in pieces]


def finish_of(completion: CompletionOutput) -> dict[str, Any]:
    """How it ended, if it has; ``error`` tells why under ``finish_reason="error"``."""
    finish: dict[str, Any] = {"finish_reason": completion.finish_reason}
    if completion.stop_reason is not None:
        finish["stop_reason"] = completion.stop_reason
    if completion.error is not None:
        finish["error"] = completion.error
    return finish
