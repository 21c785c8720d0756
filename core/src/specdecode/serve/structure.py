"""What a request says of its answer's structure, in all spellings, and how it begins behind the reasoning."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..contract import ConfigError
from ..structured.params import FIELD, StructuredOutputsParams
from ..structured.schema import without_remarks
from .parsers import ReasoningFormat, ToolFormat
from .protocol import ChatRequest, NamedTool, Request

#: vLLM's old fields, and the kind of structure each one asks for.
GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


def structure_of(body: Request) -> dict[str, Any] | None:
    """Fields of ``StructuredOutputsParams``; None: the answer is free.

    Raises:
        ConfigError: it is asked for in two ways, or a schema is missing.
    """
    found: dict[str, dict[str, Any]] = {}
    if body.structured_outputs is not None:
        found["structured_outputs"] = body.structured_outputs
    for field, kind in GUIDED.items():
        if (value := getattr(body, field)) is not None:
            found[field] = {kind: value}
    wish = body.response_format
    if wish is not None and wish.type == "json_object":
        found["response_format"] = {"json_object": True}
    elif wish is not None and wish.type == "json_schema":
        if wish.json_schema is None or wish.json_schema.schema_ is None:
            raise ConfigError("response_format.json_schema.schema is missing")
        schema = wish.json_schema.schema_
        found["response_format"] = {"json": json.dumps(schema) if isinstance(schema, bool) else schema}
    if len(found) > 1:
        raise ConfigError(f"{' and '.join(found)} ask for a structure each: keep one of them")
    return next(iter(found.values()), None)


@contextlib.contextmanager
def told_by_its_field(body: Request) -> Iterator[None]:
    """Have faults of the structure begin with the field of ``body`` that asks for it."""
    try:
        yield
    except ConfigError as error:
        fields = (*GUIDED, "response_format", "tools")
        given = next((field for field in fields if getattr(body, field, None) is not None), None)
        if given is None or body.structured_outputs is not None:
            raise
        told = (f"{given}: {fault}" if fault.startswith(f"{FIELD}.") else fault for fault in error.faults)
        raise ConfigError(*told) from error


def called_tools(body: ChatRequest) -> Sequence[Mapping[str, Any]]:
    """The functions of which the answer has to call one; none: it need not.

    Raises:
        ConfigError: there are no such tools.
    """
    choice, tools = body.tool_choice, [tool.function for tool in body.tools or ()]
    if choice is None or choice in ("none", "auto"):
        return ()
    if isinstance(choice, NamedTool):
        name = choice.function.name
        tools = [tool for tool in tools if tool.name == name]
        if not tools:
            raise ConfigError(f"tool_choice names {name!r}, which is none of the tools")
    if not tools:
        raise ConfigError("tool_choice='required' wants tools")
    return [tool.model_dump(exclude_none=True) for tool in tools]


def calling(format: ToolFormat, tools: Sequence[Mapping[str, Any]], *, several: bool) -> dict[str, Any]:
    """A structure that is calls of ``tools`` and nothing else."""
    return {"grammar": f"start: calls\n{format.grammar(tools, several=several)}"}


def behind_reasoning(structure: Mapping[str, Any], reasoning: ReasoningFormat, prompt: str) -> dict[str, Any]:
    """``structure`` for the answer alone, with free reasoning before it.

    Args:
        prompt: its end tells whether reasoning has begun, or is over.

    Raises:
        ConfigError: ``structure`` is none.
    """
    params = StructuredOutputsParams.of(structure)
    if reasoning.is_done(prompt):
        return dict(structure)
    free = f"thoughts[suffix={json.dumps(reasoning.end)}]: /(.|\\n)*/\n"
    if reasoning.begins_inside(prompt):
        start = "start: thoughts BLANKS answer\n"
    else:
        start = f"start: ({json.dumps(reasoning.start)} thoughts BLANKS)? answer\n"
    return {"grammar": f"{start}{free}BLANKS: /[ \\n]{{0,4}}/\nanswer: {_as_lark(params)}\n"}


def _as_lark(params: StructuredOutputsParams) -> str:
    """The right side of a Lark rule."""
    if params.choice is not None:
        return " | ".join(json.dumps(text) for text in params.choice)
    if params.regex is not None:
        return f"/{_escaped(params.regex)}/"
    if params.grammar is not None:
        from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

        try:
            return f"%lark {{\n{any_to_lark(params.grammar)}\n}}"
        except (ValueError, GbnfToLarkError) as error:
            raise ConfigError(f"structured_outputs.grammar cannot be read: {error}") from error
    schema: Any = {"type": "object"} if params.json is None else params.json
    schema = json.loads(schema) if isinstance(schema, str) else dict(schema)
    if isinstance(schema, dict):
        options: dict[str, Any] = {}
        if params.whitespace_pattern is not None:
            options["whitespace_pattern"] = params.whitespace_pattern
        elif params.disable_any_whitespace:
            options["whitespace_flexible"] = False
        schema = without_remarks({**schema, "x-guidance": options} if options else schema)
    return f"%json {json.dumps(schema)}"


def _escaped(regex: str) -> str:
    """A regular expression between slashes on one line."""
    out, escaped = [], False
    for character in regex:
        if character == "/" and not escaped:
            out.append("\\")
        out.append({"\n": "\\n", "\r": "\\r"}.get(character, character))
        escaped = character == "\\" and not escaped
    return "".join(out)
