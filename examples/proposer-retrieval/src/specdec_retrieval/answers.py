"""Past answers as files hold them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdecode.bench.datasets import read_entries
from specdecode.contract import ConfigError

#: A text, or token ids.
Answer = str | Sequence[int]

#: The forms of an entry, in words.
SHAPES = (
    '{"answer": "..."}, {"token_ids": [...]}, {"messages": [{"role": "assistant", "content": "..."}, ...]} '
    'or {"conversations": [{"from": "gpt", "value": "..."}, ...]}'
)
_WRITERS = ("assistant", "gpt", "bot")
_LARGEST_ID = (1 << 31) - 2


def read_answers(paths: Iterable[Path]) -> Iterator[Answer]:
    """The answers of files, and of all ``*.jsonl`` files of directories, in the order of their names.

    Args:
        paths: JSON lines, perhaps gzipped, whose entries are of :data:`SHAPES`; what else an entry has, its
            prompt say, is passed over, so a file for ``specdecode replay`` will do.

    Raises:
        ConfigError: a file cannot be read, or an entry is of no such form.
    """
    for file in _files(paths):
        for number, entry in enumerate(read_entries(file), start=1):
            try:
                yield from _answers(entry)
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ConfigError(f"{file}, entry {number} holds no answer; an entry is {SHAPES}") from None


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        found = sorted(file for file in path.iterdir() if file.name.endswith((".jsonl", ".jsonl.gz")))
        if not found:
            raise ConfigError(f"{path} has no *.jsonl file; name a folder that has some, or the files")
        yield from found


def _answers(entry: Mapping[str, Any]) -> Iterator[Answer]:
    if "token_ids" in entry:
        ids = entry["token_ids"]
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i <= _LARGEST_ID for i in ids):
            raise TypeError
        yield ids
    elif "answer" in entry:
        yield _text(entry["answer"])
    elif "messages" in entry:
        yield from _written((turn["role"], turn["content"]) for turn in entry["messages"])
    else:
        yield from _written((turn["from"], turn["value"]) for turn in entry["conversations"])


def _written(turns: Iterable[tuple[str, Any]]) -> Iterator[str]:
    for role, content in turns:
        if role in _WRITERS and content is not None:  # None: a call of a tool
            yield _text(content)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value
