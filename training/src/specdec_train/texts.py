"""Texts that the target wrote, as token ids, and the folder they are kept in, shard by shard."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np


@attrs.frozen(kw_only=True, eq=False)
class Texts:
    """Documents, one behind the other: each a prompt and the target's answer to it."""

    ids: np.ndarray  #: ``[N]`` int32, of all documents
    answer: np.ndarray  #: ``[N]`` bool: the target wrote this token
    starts: np.ndarray  #: ``[D + 1]`` int64: document ``d`` is ``starts[d]:starts[d + 1]``
    greedy: np.ndarray  #: ``[D]`` bool: the answer was drawn at temperature 0
    held_out: np.ndarray  #: ``[D]`` bool: for evaluation alone

    @classmethod
    def of(
        cls,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        greedy: Sequence[bool],
        held_out: Sequence[bool],
    ) -> Texts:
        ids = [token for pair in zip(prompts, answers, strict=True) for part in pair for token in part]
        answer = [np.repeat([False, True], [len(p), len(a)]) for p, a in zip(prompts, answers, strict=True)]
        lengths = [len(p) + len(a) for p, a in zip(prompts, answers, strict=True)]
        return cls(
            ids=np.asarray(ids, np.int32),
            answer=np.concatenate([np.zeros(0, bool), *answer]),
            starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            greedy=np.asarray(greedy, bool),
            held_out=np.asarray(held_out, bool),
        )

    @classmethod
    def joined(cls, parts: Sequence[Texts]) -> Texts:
        offsets = np.cumsum([0, *(len(part.ids) for part in parts)])
        starts = [part.starts[:-1] + offset for part, offset in zip(parts, offsets, strict=False)]
        return cls(
            ids=np.concatenate([part.ids for part in parts]),
            answer=np.concatenate([part.answer for part in parts]),
            starts=np.concatenate([*starts, offsets[-1:]]).astype(np.int64),
            greedy=np.concatenate([part.greedy for part in parts]),
            held_out=np.concatenate([part.held_out for part in parts]),
        )

    def __len__(self) -> int:
        return len(self.greedy)

    def document(self, index: int) -> np.ndarray:
        return self.ids[self.starts[index] : self.starts[index + 1]]

    def prompt(self, index: int) -> list[int]:
        """The ids of a document before its answer."""
        span = slice(self.starts[index], self.starts[index + 1])
        return [int(token) for token in self.ids[span][~self.answer[span]]]

    @property
    def answer_tokens(self) -> int:
        return int(self.answer.sum())

    def counts(self, vocab_size: int) -> np.ndarray:
        """``[vocab_size]`` int64: how often each token stands in the answers that are trained on."""
        trained = np.repeat(~self.held_out, np.diff(self.starts))
        return np.bincount(self.ids[self.answer & trained], minlength=vocab_size)


class TextStore:
    """A folder of shards ``texts-00000.safetensors``, written whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def files(self) -> list[Path]:
        return sorted(self.folder.glob("texts-*.safetensors"))

    def file(self, shard: int) -> Path:
        return self.folder / f"texts-{shard:05}.safetensors"

    def load(self) -> list[Texts]:
        from safetensors.numpy import load_file

        return [Texts(**load_file(file)) for file in self.files()]

    def save(self, shard: int, texts: Texts) -> None:
        save_arrays(self.file(shard), attrs.asdict(texts, recurse=False))


def save_arrays(file: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write a safetensors file of numpy arrays, whole or not at all."""
    from safetensors.numpy import save_file

    with_replacement(file, lambda path: save_file(arrays, path))


def with_replacement(file: Path, write: Any) -> None:
    """``write`` a file under another name, then put it in place: who is killed leaves no half of it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.part")
    write(part)
    os.replace(part, file)


def write_json(file: Path, content: Any) -> None:
    """Write JSON, whole or not at all."""
    text = json.dumps(content, indent=2) + "\n"
    with_replacement(file, lambda path: path.write_text(text, encoding="utf-8"))


def read_json(file: Path) -> Any:
    """What :func:`write_json` wrote; None if it is not there."""
    return json.loads(file.read_text("utf-8")) if file.is_file() else None
