"""Words an output must not hold, as token ids. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import attrs

from specdecode.contract import ConfigError


@attrs.frozen
class BadWords:
    """Which tokens would complete a banned word.

    ``endings`` holds, for each length of a beginning (0: a word of one token), the last tokens of the
    words that begin so.
    """

    endings: dict[int, dict[tuple[int, ...], tuple[int, ...]]]

    @classmethod
    def of(cls, words: Iterable[str], encode: Callable[[str], Sequence[int]], vocab_size: int) -> BadWords:
        """Tokenize ``words``: each as the text may hold it at its beginning, and behind a space.

        A form with a space that only ends in the other form's ids is banned with it. A form with an
        id outside the vocabulary is never drawn.

        Raises:
            ConfigError: a word has no tokens.
        """
        endings: dict[int, dict[tuple[int, ...], tuple[int, ...]]] = {}
        for word in words:
            bare = tuple(encode(word.lstrip()))
            if not bare:
                raise ConfigError(f"bad_words: the tokenizer has no tokens for {word!r}: leave it out")
            spaced = tuple(encode(" " + word.lstrip()))
            forms = [bare] if spaced[-len(bare) :] == bare else [bare, spaced]
            for *beginning, last in (form for form in forms if max(form) < vocab_size):
                known = endings.setdefault(len(beginning), {})
                known[tuple(beginning)] = (*known.get(tuple(beginning), ()), last)
        return cls(endings)

    @property
    def reach(self) -> int:
        """How many tokens before the one to draw matter."""
        return max(self.endings, default=0)

    def after(self, output_ids: Sequence[int]) -> tuple[int, ...]:
        """The tokens that must not come after ``output_ids``, of which the last ``reach`` are enough."""
        banned: tuple[int, ...] = ()
        for length, endings in self.endings.items():
            if length <= len(output_ids):
                banned += endings.get(tuple(output_ids[len(output_ids) - length :]), ())
        return banned
