"""The tokenizer of a model: what cuts texts, and how ids of another one are told from its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence

from specdecode.contract import ConfigError, TargetTokenizer

#: A text, or token ids.
Answer = str | Sequence[int]


def vocabulary_of(tokenizer: TargetTokenizer | None) -> str | None:
    """A digest of the tokens that a tokenizer's files name; None: there is none, or none that says.

    Control tokens are left out: models of one family name theirs differently and share all others.

    Raises:
        ConfigError: the tokenizer's file cannot be read.
    """
    entries = None if tokenizer is None else tokenizer.entries()
    if entries is None:
        return None
    ordinary = sorted((i, token) for i, token in entries.tokens.items() if i not in entries.special)
    return hashlib.sha256(json.dumps(ordinary).encode()).hexdigest()[:16]


def to_ids(answers: Iterable[Answer], tokenizer: TargetTokenizer | None) -> Iterator[Sequence[int]]:
    """Token ids of each answer, the texts among them cut by ``tokenizer``, which is loaded then.

    Raises:
        ConfigError: it cannot be read, or there is none.
    """
    cutter = None
    for answer in answers:
        if isinstance(answer, str):
            if tokenizer is None:
                raise ConfigError(
                    "tokenizer: answers hold text, which a tokenizer must cut into tokens: add --tokenizer "
                    "with the directory, hub id or GGUF file of the model that you serve"
                )
            cutter = cutter or tokenizer.load()
            yield cutter(answer, add_special_tokens=False).input_ids
        else:
            yield answer
