"""From the body of a request to :class:`SamplingParams`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..api.params import RequestOutputKind, SamplingParams, bias_by_id
from ..contract import ConfigError
from .protocol import ChatRequest, CompletionRequest, Request

#: Fields that mean the same there and here.
SAME = (
    "n", "temperature", "top_p", "stop", "seed", "presence_penalty", "frequency_penalty", "top_k", "min_p",
    "repetition_penalty", "min_tokens", "stop_token_ids", "include_stop_str_in_output", "ignore_eos",
    "skip_special_tokens", "spaces_between_special_tokens", "allowed_token_ids", "bad_words",
    "truncate_prompt_tokens", "speculation",
)  # fmt: skip

#: Most likeliest tokens that are told at each place, as in OpenAI's chat.
MAX_TOP_LOGPROBS = 20


def prompt_alone(body: CompletionRequest) -> bool:
    """Whether the prompt is all that is asked for, with its log-probabilities say."""
    return body.max_tokens == 0 and body.echo


def completion_params(
    body: CompletionRequest, defaults: SamplingParams, structure: Mapping[str, Any] | None
) -> SamplingParams:
    """Parameters of a completion.

    Raises:
        ConfigError: names every field that cannot be served.
    """
    _check_top("logprobs", body.logprobs)
    fields: dict[str, Any] = {"logprobs": body.logprobs}
    if body.max_tokens is not None:
        fields["max_tokens"] = body.max_tokens
    if prompt_alone(body):
        if body.min_tokens:
            raise ConfigError(f"min_tokens must be at most max_tokens=0, got {body.min_tokens}")
        fields["max_tokens"] = 1  # an engine's request draws a token, which is not told
    elif body.max_tokens == 0:
        raise ConfigError(
            "max_tokens must be an integer at least 1, or 0 with echo=true for the prompt alone, got 0"
        )
    if body.echo:
        fields["prompt_logprobs"] = body.logprobs
    if body.best_of is not None:
        fields["best_of"] = body.best_of
    if body.suffix:
        raise ConfigError("suffix is refused: models that fill in the middle are not built yet")
    return _params(body, defaults, structure, fields)


def chat_params(
    body: ChatRequest, defaults: SamplingParams, structure: Mapping[str, Any] | None
) -> SamplingParams:
    """Parameters of a chat completion; without a length it may go on to the end of the context.

    Raises:
        ConfigError: names every field that cannot be served.
    """
    both = body.max_tokens is not None and body.max_completion_tokens is not None
    if both and body.max_tokens != body.max_completion_tokens:
        raise ConfigError("max_tokens is the old name of max_completion_tokens: keep one of them")
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if wanted is not None and wanted < 1 and body.max_completion_tokens is not None:
        raise ConfigError(f"max_completion_tokens must be an integer at least 1, got {wanted}")
    top = body.top_logprobs
    if top is not None and not body.logprobs:
        raise ConfigError("top_logprobs wants logprobs=true")
    _check_top("top_logprobs", top)
    fields = {"max_tokens": wanted, "logprobs": (top or 0) if body.logprobs else None}
    return _params(body, defaults, structure, fields)


def _check_top(field: str, top: int | None) -> None:
    if top is not None and not 0 <= top <= MAX_TOP_LOGPROBS:
        raise ConfigError(f"{field} must be between 0 and {MAX_TOP_LOGPROBS}, got {top}")


def _params(
    body: Request,
    defaults: SamplingParams,
    structure: Mapping[str, Any] | None,
    fields: Mapping[str, Any],
) -> SamplingParams:
    same = {name: value for name in SAME if (value := getattr(body, name)) is not None}
    return defaults.clone(
        **same,
        **fields,
        logit_bias=bias_by_id(body.logit_bias) if body.logit_bias else None,
        structured_outputs=None if structure is None else dict(structure),
        output_kind=RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY,
    )
