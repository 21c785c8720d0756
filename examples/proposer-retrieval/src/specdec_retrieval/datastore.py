"""Past answers with their index, in memory or in a directory that is mapped into it."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import attrs
import numpy as np
from specdecode.contract import ConfigError, TargetInfo
from specdecode.conversations import SHAPES, read_exchanges

from .config import SORTED_TOKENS
from .suffix_array import END, Ints, sort_places
from .vocabulary import Answer, to_ids, vocabulary_of

FIELD = "speculative_config.datastore"
_FORMAT, _VERSION = "specdec-retrieval", 1
_HEADER, _TEXT, _ORDER = "datastore.json", "text.npy", "order.npy"
#: Tokens kept where nobody says how many: 0.8 GB on disk, and 6.5 GB of memory to build.
MAX_TOKENS = 100_000_000


@attrs.frozen(eq=False, kw_only=True)
class Datastore:
    """Answers and their index."""

    text: Ints = attrs.field(repr=False)  #: ``[N]`` int32: ids, END behind each answer
    order: Ints = attrs.field(repr=False)  #: ``[T]`` int32: places of ids, sorted by what stands there
    vocabulary: str | None  #: digest of the tokenizer's vocabulary; None: unknown
    highest_id: int

    @property
    def num_tokens(self) -> int:
        return len(self.order)

    @property
    def num_answers(self) -> int:
        return len(self.text) - len(self.order)


def build(
    answers: Iterable[Sequence[int]], vocabulary: str | None, max_tokens: int = MAX_TOKENS
) -> Datastore:
    """Index answers; of more than ``max_tokens`` tokens, END counted, the last answers are kept.

    Raises:
        ConfigError: there are none.
    """
    kept: deque[array[int]] = deque()
    size = 0
    for answer in answers:
        if answer:
            kept.append(array("i", [*answer, END]))
            size += len(kept[-1])
        while size > max_tokens:
            size -= len(kept.popleft())
    if not kept:
        raise ConfigError("the datastore would be empty: there is no answer in what it is made of")
    text = np.concatenate([np.frombuffer(one, np.int32) for one in kept])
    return Datastore(
        text=text,
        order=sort_places(text, SORTED_TOKENS),
        vocabulary=vocabulary,
        highest_id=int(text.max()),
    )


# -- directories ----------------------------------------------------------------------------------------
def save(store: Datastore, path: Path) -> None:
    """Write a directory; there is the whole of it, or nothing, and its owner alone can read it.

    Raises:
        ConfigError: there is something already, or it cannot be written.
    """
    if path.exists():
        raise ConfigError(f"out: {path} is there already; remove it, or give another path")
    header = {
        "format": _FORMAT,
        "version": _VERSION,
        "vocabulary": store.vocabulary,
        "highest_id": store.highest_id,
    }
    try:
        made = Path(tempfile.mkdtemp(dir=path.absolute().parent, prefix=f".{path.name}-"))  # mode 0700
    except OSError as error:
        raise ConfigError(f"out: cannot write {path}: {error.strerror}") from None
    try:
        np.save(made / _TEXT, store.text)
        np.save(made / _ORDER, store.order)
        (made / _HEADER).write_text(json.dumps(header), encoding="utf-8")
        os.rename(made, path)
    except OSError as error:
        raise ConfigError(f"out: cannot write {path}: {error.strerror}") from None
    finally:
        shutil.rmtree(made, ignore_errors=True)  # where it was not renamed


def open_directory(path: Path, field: str = FIELD) -> Datastore:
    """What :func:`save` wrote; its arrays are mapped, not read.

    Args:
        field: what messages call ``path``.

    Raises:
        ConfigError: it is no such directory, damaged, or of another version.
    """
    if not (path / _HEADER).is_file():
        raise ConfigError(
            f"{field}: {path} is no datastore; make one of past answers: specdecode retrieval build {path} "
            "--out DIRECTORY --tokenizer MODEL"
        )
    try:
        header = json.loads((path / _HEADER).read_text(encoding="utf-8"))
        told = header["format"], header["version"]
        if told != (_FORMAT, _VERSION):
            raise ConfigError(
                f"{field}: {path} is of {told[0]!r}, version {told[1]!r}; this is {_FORMAT!r}, version "
                f"{_VERSION}: build it again"
            )
        text, order = (np.load(path / name, mmap_mode="r", allow_pickle=False) for name in (_TEXT, _ORDER))
        whole = all(a.dtype == np.int32 and a.ndim == 1 and len(a) for a in (text, order))
        if not whole or len(order) >= len(text) or text[-1] != END:
            raise ValueError("its arrays do not belong together")
        store = Datastore(
            text=np.asarray(text),
            order=np.asarray(order),
            vocabulary=header["vocabulary"],
            highest_id=int(header["highest_id"]),
        )
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{field}: {path} is damaged ({error}); build it again") from None
    return store


# -- for a target ---------------------------------------------------------------------------------------
def check(path: Path, target: TargetInfo) -> None:
    """Refuses what :func:`load` would, for the same reasons, without indexing anything; imports no torch.

    Raises:
        ConfigError: as :func:`load`.
    """
    if path.is_dir():
        _check_fits(open_directory(path), path, target)
    elif not any(map(len, list(_answers(path, target)))):  # all are read: the last may be at fault
        raise ConfigError(f"{FIELD}: {path} holds no answer; an entry is {SHAPES}")


def load(path: Path, target: TargetInfo) -> Datastore:
    """The datastore of a directory, or one made of a file's answers.

    Raises:
        ConfigError: it is not there, cannot be read, or is of another vocabulary than the target's.
    """
    if path.is_dir():
        store = open_directory(path)
    else:
        store = build(to_ids(_answers(path, target), target.tokenizer), vocabulary_of(target.tokenizer))
    _check_fits(store, path, target)
    return store


def _answers(path: Path, target: TargetInfo) -> Iterator[Answer]:
    if not path.is_file():
        raise ConfigError(
            f"{FIELD}: {path} is not there; give a directory that `specdecode retrieval build` made, or a "
            "file of JSON lines with past answers"
        )
    told = vocabulary_of(target.tokenizer)
    for exchange in read_exchanges(path, prompts=False, field=FIELD):
        answer = exchange.answer
        if isinstance(answer, str):
            if told is None:
                raise ConfigError(
                    f"{FIELD}: {path} holds text, and the target has no tokenizer to cut it; index it first: "
                    f"specdecode retrieval build {path} --out DIRECTORY --tokenizer MODEL"
                )
        else:
            _check_ids(max(answer, default=0), path, target)
        yield answer


def _check_fits(store: Datastore, path: Path, target: TargetInfo) -> None:
    _check_ids(store.highest_id, path, target)
    if store.vocabulary is None:
        return
    theirs = vocabulary_of(target.tokenizer)
    if theirs is not None and theirs != store.vocabulary:
        raise ConfigError(
            f"{FIELD}: {path} was made with another tokenizer (vocabulary {store.vocabulary}; the target's "
            f"is {theirs}); build it again with --tokenizer {target.path or 'MODEL'}"
        )


def _check_ids(highest: int, path: Path, target: TargetInfo) -> None:
    if not target.recorded and highest >= target.vocab_size:  # of recorded texts it is a lower bound
        raise ConfigError(
            f"{FIELD}: {path} holds token id {highest}, the target's vocabulary has {target.vocab_size}: it "
            "is of another model; give one that was made with the target's tokenizer"
        )
