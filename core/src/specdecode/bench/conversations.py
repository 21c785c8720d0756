"""Past conversations, for replays: what was asked, and what was answered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from specdecode.contract import ConfigError

from .datasets import read_entries

#: The forms of an entry, in words.
SHAPES = (
    '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]}, '
    '{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}, ...]}, '
    '{"prompt": "...", "answer": "..."} or {"prompt_token_ids": [...], "token_ids": [...]}'
)
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant"}


@attrs.frozen(kw_only=True)
class Exchange:
    """One answer and what stood before it: messages, a text, or token ids."""

    prompt: Sequence[Mapping[str, str]] | str | Sequence[int]
    answer: str | Sequence[int]


def read_exchanges(path: Path, limit: int | None = None) -> list[Exchange]:
    """The first ``limit`` answers of a file; every answer of a conversation is one.

    Args:
        path: JSON lines or a JSON list, perhaps gzipped, whose entries are of :data:`SHAPES`.

    Raises:
        ConfigError: it cannot be read, an entry is of no such form, or there is no answer in it.
    """
    found: list[Exchange] = []
    for number, entry in enumerate(read_entries(path), start=1):
        try:
            found.extend(_exchanges(entry))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(f"file: {path}, entry {number} is none of {SHAPES}") from None
        if limit is not None and len(found) >= limit:
            break
    if not found:
        raise ConfigError(f"file: {path} holds no answer; an entry is {SHAPES}")
    return found[:limit]


def _exchanges(entry: Mapping[str, Any]) -> Iterator[Exchange]:
    if "prompt_token_ids" in entry:
        prompt, answer = [[int(i) for i in entry[key]] for key in ("prompt_token_ids", "token_ids")]
        if prompt and answer:
            yield Exchange(prompt=prompt, answer=answer)
    elif "prompt" in entry:
        text, said = entry["prompt"], entry["answer"]
        if not (isinstance(text, str) and isinstance(said, str)):
            raise TypeError
        if text and said:
            yield Exchange(prompt=text, answer=said)
    else:
        messages = _messages(entry)
        for index, message in enumerate(messages):
            if message["role"] == "assistant" and index and message["content"]:
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
