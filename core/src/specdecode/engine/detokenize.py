"""Tokens to text as they come, one token at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: Prompt tokens decoded along with the first output token, so that its leading space is kept.
CONTEXT_TOKENS = 5

#: What a decoder writes for bytes that are not a whole character yet.
REPLACEMENT = "\ufffd"


class Detokenizer:
    """Text of an output, in the context of its prompt.

    A token is decoded together with those since the last complete character; text that ends in an
    incomplete character is held back until the next token completes it.
    """

    def __init__(
        self, tokenizer: Any, prompt_ids: Sequence[int], *, skip_special_tokens: bool, spaces: bool
    ) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._options = {
            "skip_special_tokens": skip_special_tokens,
            "spaces_between_special_tokens": spaces,
        }
        self._ids = list(prompt_ids[-CONTEXT_TOKENS:])
        self._prefix = 0  # decoded together with what is new, for context
        self._read = len(self._ids)  # text of the ids before is out

    def append(self, token: int) -> int:
        """Take one token; returns how many characters it added."""
        self._ids.append(token)
        known = self._decode(self._ids[self._prefix : self._read])
        text = self._decode(self._ids[self._prefix :])
        if len(text) <= len(known) or text.endswith(REPLACEMENT):
            return 0
        return self._emit(text[len(known) :])

    def flush(self) -> int:
        """At the end of the output: what is still held back, incomplete as it is."""
        known = self._decode(self._ids[self._prefix : self._read])
        return self._emit(self._decode(self._ids[self._prefix :])[len(known) :])

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, **self._options))

    def _emit(self, new: str) -> int:
        self._prefix, self._read = self._read, len(self._ids)
        del self._ids[: self._prefix]
        self._read -= self._prefix
        self._prefix = 0
        self.text += new
        return len(new)
