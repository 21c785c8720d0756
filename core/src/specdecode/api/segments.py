"""Which tokens of an output came as accepted drafts, told as pieces of its text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import attrs

from ..engine.detokenize import Detokenizer


@attrs.frozen
class Segment:
    """Text of tokens that follow each other and have the same source."""

    text: str
    drafted: bool


def segments(tokenizer: Any, prompt_ids: Sequence[int], completion: Any) -> list[Segment]:
    """``completion.text`` in pieces: accepted drafts, and the target's own tokens.

    A character of several tokens belongs to the one that completes it. Text that a stop string cut
    off belongs to no piece.
    """
    return DraftMarker(tokenizer, prompt_ids).segments(completion, last=True)


class DraftMarker:
    """:func:`segments` of an output that comes bit by bit."""

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int]) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_ids, skip_special_tokens=True, spaces=True)
        self._spans: list[tuple[int, bool]] = []  # where text that is not shown yet ends, and its source
        self._shown = 0

    def segments(self, new: Any, *, last: bool) -> list[Segment]:
        """The pieces of ``new``, a completion that holds what came since the last call."""
        left = len(new.text)
        clipped = []
        for text, drafted in self._pieces(new, last):
            clipped.append((text[:left], drafted))
            left -= len(clipped[-1][0])
        merged = groupby((piece for piece in clipped if piece[0]), key=lambda piece: piece[1])
        return [Segment("".join(text for text, _ in group), drafted) for drafted, group in merged]

    def _pieces(self, new: Any, last: bool) -> Iterator[tuple[str, bool]]:
        detokenizer, drafted = self._detokenizer, False
        for token, source in zip(new.token_ids, new.token_sources, strict=True):
            drafted = source == "draft"
            detokenizer.append(token)
            self._assign(len(detokenizer.legible), drafted)
            yield from self._settled()
        if last:
            detokenizer.flush()
            self._assign(len(detokenizer.text), drafted)
            yield from self._settled()

    def _assign(self, end: int, drafted: bool) -> None:
        """What is legible now and was not before comes from ``drafted``."""
        if end > (self._spans[-1][0] if self._spans else self._shown):
            self._spans.append((end, drafted))

    def _settled(self) -> Iterator[tuple[str, bool]]:
        text = self._detokenizer.text
        while self._spans and self._shown < len(text):
            end, drafted = self._spans[0]
            start, self._shown = self._shown, min(end, len(text))
            yield text[start : self._shown], drafted
            if self._shown == end:
                del self._spans[0]
