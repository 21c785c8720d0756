"""The tokenizer of a model: what cuts texts, and how ids of another one are told from its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from specdecode.contract import ConfigError
from specdecode.heads.tokenizers import read_entries

from .answers import Answer


def vocabulary_of(folder: str | Path) -> str | None:
    """A digest of the tokens that a model's directory names; None: it has no tokenizer of its own.

    Control tokens are left out: models of one family name theirs differently and share all others.

    Raises:
        ConfigError: the tokenizer's file cannot be read.
    """
    entries = read_entries(Path(folder)) if str(folder) else None
    if entries is None:
        return None
    ordinary = sorted((i, token) for i, token in entries.tokens.items() if i not in entries.special)
    return hashlib.sha256(json.dumps(ordinary).encode()).hexdigest()[:16]


def to_ids(answers: Iterable[Answer], model: str | Path | None) -> Iterator[Sequence[int]]:
    """Token ids of each answer, the texts among them cut by the tokenizer of ``model``, which is loaded then.

    Raises:
        ConfigError: it has none, or there is no model.
    """
    tokenizer = None
    for answer in answers:
        if isinstance(answer, str):
            if model is None:
                raise ConfigError(
                    "tokenizer: answers hold text, which a tokenizer must cut into tokens: add --tokenizer "
                    "with the directory, hub id or GGUF file of the model that you serve"
                )
            if tokenizer is None:
                from specdecode.models import load_tokenizer, resolve_model  # transformers: on use

                tokenizer = load_tokenizer(resolve_model(model, load_format="dummy"))
            yield tokenizer(answer, add_special_tokens=False).input_ids
        else:
            yield answer
