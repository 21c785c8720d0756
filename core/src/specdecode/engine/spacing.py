"""Special tokens side by side without the spaces some tokenizers put between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any


class TightSpecialTokens:
    """A tokenizer's ``decode`` under ``spaces_between_special_tokens=False``.

    transformers' tokenizers on the ``tokenizers`` library take that option and do nothing with it,
    so neighbouring special tokens are decoded apart here.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        """The text of ``ids``."""
        return "".join(self._tokenizer.decode(part, **options) for part in self._parts(ids))

    def _parts(self, ids: Sequence[int]) -> Iterator[Sequence[int]]:
        """``ids``, cut between special tokens that stand side by side."""
        start = 0
        for place in range(1, len(ids)):
            if ids[place] in self._special and ids[place - 1] in self._special:
                yield ids[start:place]
                start = place
        if len(ids) > start:
            yield ids[start:]
