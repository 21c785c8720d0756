"""Past conversations, for replays and for plugins that learn from logs: what was asked, what was answered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from .contract import ConfigError
from .entries import read_entries

#: The forms of an entry, in words. It may hold more.
SHAPES = (
    '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]}, '
    '{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}, ...]}, '
    '{"prompt": "...", "answer": "..."} or {"prompt_token_ids": [...], "token_ids": [...]}'
)
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant"}
_LARGEST_ID = (1 << 31) - 1


@attrs.frozen(kw_only=True)
class Exchange:
    """One answer and what stood before it: messages, a text, or token ids; empty where the file has answers
    alone."""

    prompt: Sequence[Mapping[str, str]] | str | Sequence[int]
    answer: str | Sequence[int]


def read_exchanges(
    paths: Path | Iterable[Path], *, prompts: bool = True, field: str = "file"
) -> Iterator[Exchange]:
    """The answers of files, in order; every answer of a conversation is one, and empty ones are left out.

    Args:
        paths: JSON lines or JSON lists of :data:`SHAPES`, perhaps gzipped, or directories: of those all
            ``*.jsonl`` and ``*.jsonl.gz``, in the order of their names.
        prompts: whether an answer must have a prompt. Else ``{"answer": "..."}`` and ``{"token_ids": [...]}``
            will do, and so will an answer that begins its conversation.
        field: what messages call the files.

    Raises:
        ConfigError: a file cannot be read, or an entry is of no such form.
    """
    for path in _files([paths] if isinstance(paths, Path) else paths, field):
        for number, entry in enumerate(read_entries(path, field=field), start=1):
            try:
                found = [exchange for exchange in _exchanges(entry, prompts) if exchange.answer]
            except (ValueError, KeyError, TypeError, AttributeError):
                more = "" if prompts else "; the prompt may be left out"
                raise ConfigError(f"{field}: {path}, entry {number} is none of {SHAPES}{more}") from None
            yield from (exchange for exchange in found if exchange.prompt or not prompts)


def _files(paths: Iterable[Path], field: str) -> Iterator[Path]:
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        found = sorted(file for file in path.iterdir() if file.name.endswith((".jsonl", ".jsonl.gz")))
        if not found:
            raise ConfigError(
                f"{field}: {path} has no *.jsonl file; name a folder that has some, or the files"
            )
        yield from found


def _exchanges(entry: Mapping[str, Any], prompts: bool) -> Iterator[Exchange]:
    def prompt(key: str, empty: Any) -> Any:
        return entry[key] if prompts else entry.get(key, empty)

    if "token_ids" in entry or "prompt_token_ids" in entry:
        yield Exchange(prompt=_ids(prompt("prompt_token_ids", [])), answer=_ids(entry["token_ids"]))
    elif "answer" in entry or "prompt" in entry:
        yield Exchange(prompt=_text(prompt("prompt", "")), answer=_text(entry["answer"]))
    else:
        messages = _messages(entry)
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                yield Exchange(prompt=messages[:index], answer=message["content"])


def _messages(entry: Mapping[str, Any]) -> list[dict[str, str]]:
    if "messages" in entry:
        turns = [(turn["role"], turn["content"]) for turn in entry["messages"]]
    else:
        turns = [(turn["from"], turn["value"]) for turn in entry["conversations"]]
    return [
        {"role": _ROLES.get(role, role), "content": content}
        for role, content in turns
        if isinstance(content, str)  # of tool calls and images nothing can be read here
    ]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _ids(value: Any) -> list[int]:
    if not isinstance(value, list) or not all(type(i) is int and 0 <= i <= _LARGEST_ID for i in value):
        raise TypeError
    return value
