"""Tool calls in a model's text, and the grammars that make it write some."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import attrs

from ...engine.stop import open_stop
from ...structured.schema import without_remarks


@attrs.frozen
class ToolCall:
    """``arguments`` are JSON text, as the API has them."""

    name: str
    arguments: str


#: A piece of the answer, or a call.
Piece = str | ToolCall


class ToolParser(Protocol):
    """Splits a text that comes bit by bit."""

    def feed(self, text: str) -> Iterator[Piece]: ...
    def end(self) -> Iterator[Piece]: ...


class ToolFormat(Protocol):
    """How a family of models writes tool calls."""

    def parser(self) -> ToolParser:
        """A parser at the beginning of an answer."""

    def grammar(self, tools: Sequence[Mapping[str, Any]], *, several: bool) -> str:
        """Lark rules, the first one ``calls``, of an answer that is one call, or one or more.

        Args:
            tools: functions with ``name`` and perhaps ``parameters``, a JSON schema.
        """


def read_call(entry: Any) -> ToolCall | None:
    """A call from ``{"name": ..., "arguments" or "parameters": {...}}``; None if it is none."""
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        return None
    arguments = entry.get("arguments", entry.get("parameters", {}))
    if isinstance(arguments, str):  # JSON in JSON
        return ToolCall(entry["name"], arguments)
    if not isinstance(arguments, dict):
        return None
    return ToolCall(entry["name"], json.dumps(arguments, ensure_ascii=False))


def call_schema(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """JSON schema of a call of one of ``tools``."""
    calls = []
    for tool in tools:
        arguments = without_remarks(tool.get("parameters") or {"type": "object"})
        properties = {"name": {"const": tool["name"]}, "arguments": arguments}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


@attrs.frozen(kw_only=True)
class TaggedCalls:
    """Each call is JSON between tags, with text around it: Hermes, Qwen and others."""

    start: str
    end: str

    def parser(self) -> ToolParser:
        return TaggedParser(self)

    def grammar(self, tools: Sequence[Mapping[str, Any]], *, several: bool) -> str:
        start, end = json.dumps(f"{self.start}\n"), json.dumps(f"\n{self.end}")
        more = ' ("\\n" call)*' if several else ""
        schema = json.dumps(call_schema(tools))
        return f"calls: call{more}\ncall: {start} call_json {end}\ncall_json: %json {schema}\n"


class TaggedParser:
    def __init__(self, format: TaggedCalls) -> None:
        self._format = format
        self._held = ""
        self._inside = False

    def feed(self, text: str) -> Iterator[Piece]:
        self._held += text
        while True:
            wanted = self._format.end if self._inside else self._format.start
            before, tag, after = self._held.partition(wanted)
            if not tag:
                break
            self._held = after
            if self._inside:
                yield self._call(before, self._format.end)
            elif before := before.rstrip():  # blanks before a call are nobody's
                yield before
            self._inside = not self._inside
        if not self._inside:
            keep = open_stop(self._held, (self._format.start,))
            out = self._held[: len(self._held) - keep]
            out = out[: len(out.rstrip())]
            self._held = self._held[len(out) :]
            if out:
                yield out

    def end(self) -> Iterator[Piece]:
        held, self._held = self._held, ""
        if self._inside:
            yield self._call(held, "")
        elif held:
            yield held

    def _call(self, text: str, tag: str) -> Piece:
        try:
            call = read_call(json.loads(text))
        except (ValueError, RecursionError):
            call = None
        return call or f"{self._format.start}{text}{tag}"  # no call: what the model wrote


@attrs.frozen
class BareCalls:
    """The whole answer is JSON, of a call or of a list of calls: Llama 3.1 and others."""

    def parser(self) -> ToolParser:
        return BareParser()

    def grammar(self, tools: Sequence[Mapping[str, Any]], *, several: bool) -> str:
        schema: dict[str, Any] = call_schema(tools)
        if several:
            schema = {"type": "array", "items": schema, "minItems": 1}
        return f"calls: %json {json.dumps(schema)}\n"


class BareParser:
    def __init__(self) -> None:
        self._held: str | None = ""  # None: it is no JSON

    def feed(self, text: str) -> Iterator[Piece]:
        if self._held is None:
            yield text
            return
        self._held += text
        begun = self._held.lstrip()
        if begun and begun[0] not in "[{":
            text, self._held = self._held, None
            yield text

    def end(self) -> Iterator[Piece]:
        held, self._held = self._held, ""
        if not held:
            return
        try:
            value = json.loads(held)
        except (ValueError, RecursionError):
            value = None
        calls = [read_call(entry) for entry in (value if isinstance(value, list) else [value])]
        if calls and all(calls):
            yield from (call for call in calls if call)
        else:
            yield held


#: Name -> format, as given to ``--tool-call-parser``.
TOOL_PARSERS: dict[str, ToolFormat] = {
    "hermes": TaggedCalls(start="<tool_call>", end="</tool_call>"),
    "json": BareCalls(),
}
