"""Prompts from the files that speculative decoding is usually measured on. Nothing is downloaded.

Most readers take the first user turn of an entry, as a benchmark cannot know the model's answer to it.
``messages`` takes the answers of the file as the model's: every turn is a prompt behind those before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from specdecode.contract import ConfigError
from specdecode.entries import read_entries

from .tasks import Prompt, Task

#: What an article is put behind.
SUMMARISE = "Summarize the following article in a few sentences.\n\n"


@attrs.frozen(kw_only=True)
class Found:
    """A prompt of an entry."""

    text: str
    id: str | None = None  #: None: the entry's number
    task: str | None = None  #: None: the file's name
    before: tuple[Mapping[str, str], ...] = ()  #: messages


@attrs.frozen(kw_only=True)
class DatasetFormat:
    """How entries of a kind of file become prompts.

    ``read`` gives nothing for an entry without a prompt, which is passed over, and raises ``ValueError``
    for one that is not of this format.
    """

    name: str
    shape: str  #: of an entry, in words, for messages and documentation
    read: Callable[[Mapping[str, Any]], Sequence[Found]]


def read_dataset(path: Path, format: str, limit: int | None = None) -> tuple[Task, ...]:
    """The first ``limit`` prompts of a file, by task.

    Args:
        path: JSON lines, a JSON list or (``cnn_dailymail``) CSV, each perhaps gzipped.
        format: a key of :data:`FORMATS`.
        limit: None: all.

    Raises:
        ConfigError: the format is unknown, the file cannot be read, an entry is not of the format, or
            there is no prompt in it.
    """
    if format not in FORMATS:
        raise ConfigError(f"dataset-format must be one of {', '.join(FORMATS)}, got {format!r}")
    kind = FORMATS[format]
    grouped: dict[str, list[Prompt]] = {}
    count = 0
    for number, entry in enumerate(read_entries(path, field="dataset"), start=1):
        if limit is not None and count >= limit:
            break
        try:
            found = kind.read(_mapping(entry))
        except (ValueError, KeyError) as error:
            told = f"has no {error}" if isinstance(error, KeyError) else str(error)
            raise ConfigError(
                f"dataset: {path}, entry {number} {told}; {format} wants {kind.shape}"
            ) from None
        for one in found if limit is None else found[: limit - count]:
            prompt = Prompt(id=one.id or str(number), text=one.text, before=one.before)
            grouped.setdefault(one.task or path.stem, []).append(prompt)
            count += 1
    if not grouped:
        raise ConfigError(f"dataset: {path} holds no prompt; {format} wants {kind.shape}")
    return _tasks(grouped, path)


def _tasks(grouped: Mapping[str, list[Prompt]], path: Path) -> tuple[Task, ...]:
    return tuple(
        Task(name=name, summary=f"from {path.name}", prompts=tuple(_distinct(prompts)))
        for name, prompts in grouped.items()
    )


def _distinct(prompts: list[Prompt]) -> Iterator[Prompt]:
    """Ids that a file gives twice are told apart."""
    seen: dict[str, int] = {}
    for prompt in prompts:
        seen[prompt.id] = seen.get(prompt.id, 0) + 1
        count = seen[prompt.id]
        yield prompt if count == 1 else attrs.evolve(prompt, id=f"{prompt.id}#{count}")


# -- entries ----------------------------------------------------------------------------------------
def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"holds {str(value)[:40]!r} where an object belongs")
    return value


def _string(entry: Mapping[str, Any], key: str) -> str:
    value = entry[key]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"has {key} = {str(value)[:40]!r}, which is no text")
    return value


def _id(entry: Mapping[str, Any], key: str) -> str | None:
    value = entry.get(key)
    return None if value is None else str(value)


def _sharegpt(entry: Mapping[str, Any]) -> list[Found]:
    turns = entry["conversations"]
    if not isinstance(turns, list):
        raise ValueError(f"has conversations = {str(turns)[:40]!r}, which is no list")
    for turn in map(_mapping, turns):
        if turn["from"] in ("human", "user"):
            text = str(turn["value"]).strip()
            return [Found(text=text, id=_id(entry, "id"))] if text else []
    return []


def _cnn_dailymail(entry: Mapping[str, Any]) -> list[Found]:
    return [Found(text=SUMMARISE + _string(entry, "article").strip(), id=_id(entry, "id"))]


def _humaneval(entry: Mapping[str, Any]) -> list[Found]:
    _string(entry, "entry_point")  # other sets have a prompt as well
    return [Found(text=_string(entry, "prompt"), id=_string(entry, "task_id"))]


def _mt_bench(entry: Mapping[str, Any]) -> list[Found]:
    turns = entry["turns"]
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str) or not turns[0].strip():
        raise ValueError(f"has turns = {str(turns)[:40]!r}, which is no list of texts")
    return [Found(text=turns[0], id=_id(entry, "question_id"), task=_string(entry, "category"))]


def _own(entry: Mapping[str, Any]) -> list[Found]:
    task = _string(entry, "task") if "task" in entry else None
    return [Found(text=_string(entry, "prompt"), id=_id(entry, "id"), task=task)]


def _messages(entry: Mapping[str, Any]) -> list[Found]:
    turns = entry["messages"]
    if not isinstance(turns, list):
        raise ValueError(f"has messages = {str(turns)[:40]!r}, which is no list")
    told = [{key: _string(_mapping(turn), key) for key in ("role", "content")} for turn in turns]
    own, task = _id(entry, "id"), _string(entry, "task") if "task" in entry else None
    users = [place for place, message in enumerate(told) if message["role"] == "user"]
    return [
        Found(
            text=told[place]["content"],
            id=own and f"{own}/{number}",
            task=task,
            before=tuple(told[:place]),
        )
        for number, place in enumerate(users, start=1)
    ]


FORMATS: dict[str, DatasetFormat] = {
    kind.name: kind
    for kind in (
        DatasetFormat(name="jsonl", shape='{"prompt": "..."}, perhaps with "task" and "id"', read=_own),
        DatasetFormat(
            name="sharegpt",
            shape='{"id": "...", "conversations": [{"from": "human", "value": "..."}, ...]}',
            read=_sharegpt,
        ),
        DatasetFormat(
            name="cnn_dailymail",
            shape='{"article": "...", "id": "..."}, or CSV with these columns',
            read=_cnn_dailymail,
        ),
        DatasetFormat(
            name="humaneval",
            shape='{"task_id": "HumanEval/0", "prompt": "...", "entry_point": "..."}',
            read=_humaneval,
        ),
        DatasetFormat(
            name="mt_bench",
            shape='{"question_id": 81, "category": "...", "turns": ["...", "..."]}',
            read=_mt_bench,
        ),
        DatasetFormat(
            name="messages",
            shape='{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": '
            '"..."}, ...]}, perhaps with "task" and "id"',
            read=_messages,
        ),
    )
}
