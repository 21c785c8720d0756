"""Reasoning that stands in tags before the answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import attrs

from ...engine.stop import open_stop

Part = tuple[Literal["reasoning", "content"], str]


@attrs.frozen(kw_only=True)
class ReasoningFormat:
    """The tags around reasoning. Some chat templates write the first one, or both, into the prompt."""

    start: str
    end: str

    def begins_inside(self, prompt: str) -> bool:
        """Whether the prompt ends inside reasoning."""
        return prompt.rfind(self.start) > prompt.rfind(self.end)

    def is_done(self, prompt: str) -> bool:
        """Whether the prompt ends with the end of reasoning, so that the answer has none."""
        return prompt.rstrip().endswith(self.end)

    def parser(self, prompt: str) -> ReasoningParser:
        return ReasoningParser(self, prompt)


class ReasoningParser:
    """Splits a text that comes bit by bit; nothing is given out that may yet turn out to be a tag."""

    def __init__(self, format: ReasoningFormat, prompt: str) -> None:
        self._format = format
        self._state: Literal["before", "inside", "after"] = "before"
        if format.begins_inside(prompt):
            self._state = "inside"
        elif format.is_done(prompt):
            self._state = "after"
        self._held = ""
        self._blank = self._state != "before"  # leave out white space until something else comes

    def feed(self, text: str) -> Iterator[Part]:
        """The parts that ``text`` settles."""
        self._held += text
        yield from self._settled()

    def end(self) -> Iterator[Part]:
        """What is left when the text ends."""
        held, self._held = self._held, ""
        yield from self._give("reasoning" if self._state == "inside" else "content", held)

    def _settled(self) -> Iterator[Part]:
        if self._state == "before":
            start, text = self._format.start, self._held.lstrip()
            if text.startswith(start):
                self._state, self._held, self._blank = "inside", text[len(start) :], True
            elif start.startswith(text):
                return  # it may begin with the tag
            else:
                self._state = "after"
        if self._state == "inside":
            before, tag, after = self._held.partition(self._format.end)
            if tag:
                self._held = after
                yield from self._give("reasoning", before.rstrip())
                self._state, self._blank = "after", True
            else:
                keep = open_stop(before, (self._format.end,))
                out = before[: len(before) - keep]
                out = out[: len(out.rstrip())]  # blanks before the end tag are nobody's
                self._held = before[len(out) :]
                yield from self._give("reasoning", out)
        if self._state == "after":
            held, self._held = self._held, ""
            yield from self._give("content", held)

    def _give(self, kind: Literal["reasoning", "content"], text: str) -> Iterator[Part]:
        if self._blank:
            text = text.lstrip()
        if text:
            self._blank = False
            yield kind, text


#: Name -> format, as given to ``--reasoning-parser``.
REASONING_PARSERS: dict[str, ReasoningFormat] = {
    "think": ReasoningFormat(start="<think>", end="</think>"),
    "seed_think": ReasoningFormat(start="<seed:think>", end="</seed:think>"),
}
REASONING_PARSERS |= dict.fromkeys(("qwen3", "deepseek_r1"), REASONING_PARSERS["think"])
