"""The prompts a benchmark runs on: the built-in tasks, or a file of the user's."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import attrs

from specdecode.contract import ConfigError


@attrs.frozen(kw_only=True)
class Prompt:
    """One user message, and what was said before it."""

    id: str  #: unique within its task
    text: str
    before: tuple[Mapping[str, str], ...] = ()  #: messages, ``{"role": ..., "content": ...}``

    @property
    def messages(self) -> list[dict[str, str]]:
        """The whole conversation, for a chat template."""
        return [*map(dict, self.before), {"role": "user", "content": self.text}]

    @property
    def whole(self) -> str:
        """The whole conversation as one text, where there is no template."""
        return "\n\n".join(message["content"] for message in self.messages)


@attrs.frozen(kw_only=True)
class Task:
    """Prompts of one kind, reported as one row of a benchmark."""

    name: str
    summary: str
    prompts: tuple[Prompt, ...]


#: Sets of tasks that ship beside the usual ones, by the name of their folder. ``repetitive``: each task is
#: one piece of work done again and again, so that the outputs so far tell much of the next one.
COLLECTIONS = ("repetitive",)


def builtin_tasks(collection: str | None = None) -> tuple[Task, ...]:
    """The tasks that ship with core, in a fixed order; those of :data:`COLLECTIONS` by their name."""
    folder = resources.files("specdecode.bench") / "data"
    if collection is not None:
        folder = folder / collection
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".toml")), key=lambda f: f.name)
    return tuple(map(_read_builtin, files))


def _read_builtin(file: Any) -> Task:
    data = tomllib.loads(file.read_text(encoding="utf-8"))
    prompts = tuple(Prompt(id=p["id"], text=p["text"].strip()) for p in data["prompts"])
    return Task(name=data["name"], summary=data["summary"], prompts=prompts)


def pick(tasks: Sequence[Task], names: Sequence[str] | None) -> tuple[Task, ...]:
    """Those of ``tasks`` that are named, in the order of the names; all if there are none.

    Raises:
        ConfigError: a name is unknown.
    """
    by_name = {task.name: task for task in tasks}
    names = list(by_name) if not names else list(dict.fromkeys(names))
    if unknown := [name for name in names if name not in by_name]:
        raise ConfigError(
            *(f"task: there is no {name!r}; there are {', '.join(by_name)}" for name in unknown)
        )
    return tuple(by_name[name] for name in names)


def load_tasks(path: Path) -> tuple[Task, ...]:
    """Prompts from a file: JSON lines if its name ends in ``.jsonl``, else one prompt a line.

    A JSON line is an object with ``prompt`` and, optionally, ``task``; lines without a task, and
    all lines of a plain file, belong to a task named after the file. Empty lines are skipped.

    Raises:
        ConfigError: the file cannot be read or holds no prompt, or lines of it are wrong (all of
            them are named).
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise ConfigError(
            f"prompts: cannot read {path}: {error.strerror}; give the path of a text file"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"prompts: {path} is not UTF-8 text (byte {error.start}); save it as UTF-8"
        ) from None
    parse = _parse_json if path.suffix == ".jsonl" else _parse_plain
    grouped: dict[str, list[Prompt]] = {}
    faults = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            name, text = parse(line, path.stem)
        except ValueError as error:
            faults.append(f"prompts: {path}, line {number}: {error}")
        else:
            grouped.setdefault(name, []).append(Prompt(id=str(number), text=text))
    if faults:
        raise ConfigError(*faults)
    if not grouped:
        raise ConfigError(f"prompts: {path} holds no prompt; write one a line")
    return tuple(
        Task(name=name, summary=f"from {path.name}", prompts=tuple(prompts))
        for name, prompts in grouped.items()
    )


def _parse_plain(line: str, default: str) -> tuple[str, str]:
    return default, line.strip()


def _parse_json(line: str, default: str) -> tuple[str, str]:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(entry, dict):
        raise ValueError(f'expected an object such as {{"prompt": "..."}}, got {line.strip()[:40]}')
    if unknown := sorted(entry.keys() - {"prompt", "task"}):
        raise ValueError(f"unknown key {unknown[0]!r}; the keys are 'prompt' and 'task'")
    prompt, task = entry.get("prompt"), entry.get("task", default)
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError(f"'prompt' must be a text that is not empty, got {prompt!r}")
    if not isinstance(task, str) or not task:
        raise ValueError(f"'task' must be a name, got {task!r}")
    return task, prompt
