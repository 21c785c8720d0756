"""Which tokens the ids of two checkpoints stand for: told by their tokenizers' files, without torch."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from ..contract import ConfigError, TokenizerEntries


def read_entries(folder: Path) -> TokenizerEntries | None:
    """A tokenizer's entries, from ``tokenizer.json`` or ``vocab.json``; None if there is neither.

    Raises:
        ConfigError: the file cannot be read.
    """
    for name in ("tokenizer.json", "vocab.json"):
        file = folder / name
        if file.is_file():
            return _read(file, file.stat().st_mtime_ns)
    return None


def first_difference(ours: TokenizerEntries, theirs: TokenizerEntries) -> int | None:
    """The first id that both have for different tokens; control tokens of both aside."""
    control = ours.special & theirs.special
    for i in sorted(ours.tokens.keys() & theirs.tokens.keys()):
        if ours.tokens[i] != theirs.tokens[i] and i not in control:
            return i
    return None


def check_tokenizer(draft: Path, target: str | Path, where: str) -> None:
    """Where a head and its target both carry a tokenizer, refuse another one.

    Args:
        draft, target: directories.
        where: what messages call the head's checkpoint.

    Raises:
        ConfigError: names the first id that differs, or a file that cannot be read.
    """
    theirs, ours = read_entries(draft), read_entries(Path(target))
    if ours is None or theirs is None:
        return
    odd = first_difference(ours, theirs)
    if odd is not None:
        raise ConfigError(
            f"{where} was made for another tokenizer: its token {odd} is {theirs.tokens[odd]!r}, the "
            f"target's is {ours.tokens[odd]!r}"
        )


@functools.lru_cache(maxsize=4)  # a method is asked for its needs more than once
def _read(file: Path, _changed: int) -> TokenizerEntries:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        added: list[Any] = []
        if file.name == "tokenizer.json":
            content, added = content["model"]["vocab"], content.get("added_tokens") or []
        if isinstance(content, list):  # unigram: (token, score) in the order of the ids
            tokens = {i: str(entry[0]) for i, entry in enumerate(content)}
        else:
            tokens = {int(i): str(token) for token, i in content.items()}
        tokens |= {int(entry["id"]): str(entry["content"]) for entry in added}
        special = frozenset(int(entry["id"]) for entry in added if entry.get("special"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConfigError(
            f"{file} cannot be read as a tokenizer ({type(error).__name__}: {error}); fetch it again"
        ) from error
    return TokenizerEntries(tokens, special)
