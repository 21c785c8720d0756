"""Reasoning, then the answer with its tool calls: both parsers over the text of one completion."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs

from .reasoning import Part, ReasoningFormat
from .tools import Piece, ToolCall, ToolFormat


@attrs.define
class Delta:
    """What a piece of text added."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = attrs.field(factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


class AnswerParser:
    """Splits a completion that comes bit by bit.

    Args:
        prompt: text of the prompt, which may end inside reasoning.
        reasoning, tools: None: that part is not told apart.
    """

    def __init__(self, prompt: str, reasoning: ReasoningFormat | None, tools: ToolFormat | None) -> None:
        self._reasoning = reasoning.parser(prompt) if reasoning else None
        self._tools = tools.parser() if tools else None

    def feed(self, text: str, *, last: bool = False) -> Delta:
        """What ``text`` settles; ``last``: the completion ends with it."""
        return _sum(self._pieces(text, last))

    def _pieces(self, text: str, last: bool) -> Iterator[Part | Piece]:
        for kind, part in self._parts(text, last):
            if kind == "reasoning":
                yield kind, part
            elif self._tools is None:
                yield part
            else:
                yield from self._tools.feed(part)
        if last and self._tools is not None:
            yield from self._tools.end()

    def _parts(self, text: str, last: bool) -> Iterator[Part]:
        if self._reasoning is None:
            yield "content", text
            return
        yield from self._reasoning.feed(text)
        if last:
            yield from self._reasoning.end()


def _sum(pieces: Iterable[Part | Piece]) -> Delta:
    delta = Delta()
    for piece in pieces:
        if isinstance(piece, ToolCall):
            delta.calls.append(piece)
        elif isinstance(piece, str):
            delta.content += piece
        else:
            delta.reasoning += piece[1]
    return delta
