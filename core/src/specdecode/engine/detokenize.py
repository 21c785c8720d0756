"""Tokens to text as they come, one token at a time, exactly as the tokenizer decodes them all at once.

``tokenizers.decoders.DecodeStream`` does nearly this, but forgets an output that ends inside a
character, and raises where a later byte changes the text of earlier ones (see :class:`Detokenizer`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import attrs

from .spacing import TightSpecialTokens

#: Tokens decoded along with a new one: enough for the character it completes and the space before it.
CONTEXT_TOKENS = 8
#: Tokens decoded along at most, but for a run of byte tokens.
MAX_CONTEXT_TOKENS = 24

#: What a decoder writes for bytes that are no character, or not a whole one yet.
REPLACEMENT = "\ufffd"


class Detokenizer:
    """Text of an output: what the tokenizer makes of prompt and output, less what it makes of the prompt.

    ``text`` is settled: no later token changes it. ``pending`` is how it would go on if the output
    ended here: the beginning of a character, or a run of byte tokens (``<0xE4>``), since these
    tokenizers decode a run as a whole, and one wrong byte makes all of it unreadable.

    The decoder is called with ``clean_up_tokenization_spaces=False``: cleaning up would take back
    spaces that are out already.
    """

    def __init__(
        self, tokenizer: Any, prompt_ids: Sequence[int], *, skip_special_tokens: bool, spaces: bool
    ) -> None:
        self.text = ""
        self.pending = ""
        self._kinds = TokenKinds.of(tokenizer)
        self._left_out: frozenset[int] = self._kinds.special if skip_special_tokens else frozenset()
        self._tokenizer = tokenizer
        self._decoder = tokenizer if skip_special_tokens or spaces else TightSpecialTokens(tokenizer)
        self._options = {
            "skip_special_tokens": skip_special_tokens,
            "spaces_between_special_tokens": spaces,
            "clean_up_tokenization_spaces": False,
        }
        self._ids = self._context(prompt_ids)  # decoded along with what comes
        self._decoded = self._decode(self._ids)
        self._out = len(self._decoded)  # characters of it that are the prompt's or in ``text``
        self._prompt: str | None = self._decoded  # until something is in ``text``

    @property
    def legible(self) -> str:
        """``text`` and ``pending``, but for the beginning of a character."""
        return self.text if REPLACEMENT in self.pending else self.text + self.pending

    def append(self, token: int) -> int:
        """Take one token; returns how many characters were settled by it."""
        if not self._has_text(token):
            return 0
        self._ids.append(token)
        decoded = self._decoded = self._decode(self._ids)
        if self._prompt is not None:  # the output may complete the prompt's last character
            self._out = _shared(self._prompt, decoded)
        settled = self._out
        if token not in self._kinds.bytes:
            settled = max(settled, len(decoded) - decoded.endswith(REPLACEMENT))
        new = decoded[self._out : settled]
        self.pending = decoded[settled:]
        if new:
            self.text += new
            self._out, self._prompt = settled, None
            self._forget()
        return len(new)

    def flush(self) -> int:
        """At the end of the output: settle what is pending, as it is; returns how many characters."""
        new, self.pending = self.pending, ""
        self.text += new
        return len(new)

    def cut(self, length: int) -> None:
        """At the end of the output: keep the first ``length`` characters."""
        self.flush()
        self.text = self.text[:length]

    def _context(self, prompt_ids: Sequence[int]) -> list[int]:
        """The prompt's last tokens that have a text, from before a run of bytes on."""
        context: list[int] = []
        for token in reversed(prompt_ids):
            if len(context) >= CONTEXT_TOKENS and context[-1] not in self._kinds.bytes:
                break
            if self._has_text(token):
                context.append(token)
        return context[::-1]

    def _has_text(self, token: int) -> bool:
        """False for special tokens to be left out, and ids of the model's vocabulary alone."""
        return token not in self._left_out and self._tokenizer.convert_ids_to_tokens(token) is not None

    def _forget(self) -> None:
        """Drop old tokens, as long as some settled text is left for the next one to go on from."""
        if len(self._ids) <= MAX_CONTEXT_TOKENS:
            return
        first = len(self._ids) - CONTEXT_TOKENS
        while first and self._ids[first - 1] in self._kinds.bytes:
            first -= 1
        rest = self._decode(self._ids[first:])
        out = len(rest) - (len(self._decoded) - self._out)
        if out > 0:
            del self._ids[:first]
            self._decoded, self._out = rest, out

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._decoder.decode(ids, **self._options))


def _shared(one: str, other: str) -> int:
    """Length of the prefix that two texts share."""
    differ = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))


def token_bytes(tokenizer: Any, token: int, text: str) -> bytes:
    """What a token stands for in UTF-8: it may begin or end within a character, which ``text`` cannot show.

    Args:
        text: the token decoded alone.
    """
    if REPLACEMENT not in text:
        return text.encode("utf-8", "replace")
    piece = str(tokenizer.convert_ids_to_tokens(token))
    if token in TokenKinds.of(tokenizer).bytes:
        return bytes.fromhex(piece[3:5])
    letters = _byte_letters()
    if all(letter in letters for letter in piece):
        return bytes(letters[letter] for letter in piece)
    return text.encode("utf-8", "replace")


@functools.cache
def _byte_letters() -> Mapping[str, int]:
    """The letters that byte-level tokenizers write bytes as."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {letter: byte for byte, letter in bytes_to_unicode().items()}


@attrs.frozen(eq=False)
class TokenKinds:
    """Ids of a tokenizer that are decoded in their own way."""

    special: frozenset[int]  #: nothing under ``skip_special_tokens``
    bytes: frozenset[int]  #: ``<0x00>`` to ``<0xFF>``: a byte of a character that is no token

    @classmethod
    def of(cls, tokenizer: Any) -> TokenKinds:
        """Found out once for each tokenizer."""
        kinds = _KINDS.get(tokenizer)
        if kinds is None:
            kinds = _KINDS[tokenizer] = cls(_special_ids(tokenizer), _byte_ids(tokenizer))
        return kinds


_KINDS: WeakKeyDictionary[Any, TokenKinds] = WeakKeyDictionary()


def _special_ids(tokenizer: Any) -> frozenset[int]:
    added = tokenizer.added_tokens_decoder
    marked = {*tokenizer.all_special_ids, *(token for token, entry in added.items() if entry.special)}
    return frozenset(token for token in marked if not tokenizer.decode([token], skip_special_tokens=True))


def _byte_ids(tokenizer: Any) -> frozenset[int]:
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    ids = tokenizer.convert_tokens_to_ids(names)  # of a name it does not know: None, or the unknown token's
    known = [(name, token) for name, token in zip(names, ids, strict=True) if token is not None]
    return frozenset(token for name, token in known if tokenizer.convert_ids_to_tokens(token) == name)
