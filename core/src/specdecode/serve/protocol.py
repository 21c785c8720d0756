"""Bodies of requests, as OpenAI's API has them, with the fields that vLLM and specdecode add."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, WithJsonSchema, model_validator

from ..api.updating import UpdateMode

#: A 64-bit number: no meaning here, and no room elsewhere, for larger ones.
Int = Annotated[StrictInt, Field(ge=-(2**63), le=2**63 - 1)]
#: What ``SamplingParams`` checks further.
Number = Annotated[float, Field(allow_inf_nan=False)]

_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_IMAGE_PART = {
    "type": "object",
    "properties": {
        "type": {"const": "image_url"},
        "image_url": {"type": "object", "properties": {"url": {"type": "string"}}, "required": ["url"]},
    },
    "required": ["type", "image_url"],
}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"type": "string", "minLength": 1, "examples": ["system", "user", "assistant", "tool"]},
        "content": {
            "anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": [_TEXT_PART, _IMAGE_PART]}}]
        },
    },
    "required": ["role", "content"],
}
#: ``api.chat`` checks messages, and templates read further keys; clients are told what most of them have.
Messages = Annotated[
    list[dict[str, Any]],
    Field(min_length=1),
    WithJsonSchema({"type": "array", "minItems": 1, "items": _MESSAGE}),
]
#: ``StructuredOutputsParams`` checks it.
Structure = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "json": {"type": ["object", "string"]},
                "regex": {"type": "string"},
                "choice": {"type": "array", "items": {"type": "string"}},
                "grammar": {"type": "string"},
                "json_object": {"type": "boolean"},
                "whitespace_pattern": {"type": "string"},
                "disable_any_whitespace": {"type": "boolean"},
                "disable_additional_properties": {"type": "boolean"},
            },
            "additionalProperties": False,
        }
    ),
]


class Body(BaseModel):
    """Unknown fields are refused. Null is as if left out: some clients send every field that they know."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {
            name: value for name, value in given.items() if value is not None or name not in cls.model_fields
        }


class StreamOptions(Body):
    include_usage: StrictBool = False
    #: usage so far in every chunk
    continuous_usage_stats: StrictBool = False
    #: accepted for OpenAI's clients; there is no obfuscation here
    include_obfuscation: StrictBool | None = None


class WeightsRequest(Body):
    """Of ``POST /update_weights``."""

    model: str = Field(min_length=1, max_length=4096)
    mode: UpdateMode = "wait"


class JsonSchema(BaseModel):
    name: str = "response"
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: StrictBool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Request(Body):
    """What completions and chat have in common; None asks for the model's default."""

    model: str | None = None
    n: Int = 1
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    max_tokens: Int | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    stop: str | list[str] | None = None
    seed: Int | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    response_format: ResponseFormat | None = None
    user: str | None = None

    # as in vLLM
    top_k: Int | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    min_tokens: Int | None = None
    stop_token_ids: list[Int] | None = None
    include_stop_str_in_output: StrictBool | None = None
    ignore_eos: StrictBool | None = None
    skip_special_tokens: StrictBool | None = None
    spaces_between_special_tokens: StrictBool | None = None
    allowed_token_ids: list[Int] | None = None
    bad_words: list[str] | None = None
    truncate_prompt_tokens: Int | None = None
    structured_outputs: Structure | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    priority: Int = 0

    # our own
    #: most drafts a step: false is off, true and null are the engine's setting
    speculation: StrictBool | Int | None = None
    #: tell for each piece of text whether it came as an accepted draft
    token_sources: StrictBool = False

    # accepted for OpenAI's clients, without meaning here
    store: StrictBool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class CompletionRequest(Request):
    """Body of ``/v1/completions``."""

    prompt: str | list[str] | list[Int] | list[list[Int]]
    #: log-probabilities of this many likeliest tokens, and of the chosen one
    logprobs: Int | None = None
    echo: StrictBool = False
    best_of: Int | None = None
    suffix: str | None = None


class Function(Body):
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


class ChatRequest(Request):
    """Body of ``/v1/chat/completions``."""

    messages: Messages
    max_completion_tokens: Int | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: StrictBool = True
    reasoning_effort: str | None = None
    modalities: list[Literal["text"]] | None = None
    verbosity: str | None = None

    # as in vLLM
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool = False
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: StrictBool = True


#: Every field of a request that generates.
FIELDS = sorted({*CompletionRequest.model_fields, *ChatRequest.model_fields})

#: Fields of each endpoint's body, to name the nearest one to an unknown one.
FIELDS_OF = {
    "/v1/completions": tuple(CompletionRequest.model_fields),
    "/v1/chat/completions": tuple(ChatRequest.model_fields),
    "/update_weights": tuple(WeightsRequest.model_fields),
}
