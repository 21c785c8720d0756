"""Reduced draft vocabularies and the tokenizer a head was made for, judged before any weight is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from specdecode.contract import CheckpointInfo, ConfigError

#: Sizes of one vocabulary differ by padding to a multiple of this at most.
_PADDING = 512


def is_padding(size: int, other: int) -> bool:
    """Whether two sizes may be one vocabulary, padded in two ways."""
    difference = abs(size - other)
    return difference < _PADDING and difference * 8 <= min(size, other)


def draft_ids(
    draft: CheckpointInfo, names: dict[str, str], rows: int | None, vocab_size: int, where: str
) -> np.ndarray | None:
    """``[Vd]`` int64: the target's id of each draft id; None: they are the same.

    Args:
        names: canonical name -> stored name.
        rows: of the head's own output layer; None if it has none.
        vocab_size: the target's.

    Raises:
        ConfigError: a map points outside, or names an id twice, or does not fit the others.
    """
    if "d2t" in names:
        offsets = _read(draft, names["d2t"]).reshape(-1).astype(np.int64)
        ids = np.arange(len(offsets)) + offsets
    elif "token_map" in names:
        ids = _read(draft, names["token_map"]).reshape(-1).astype(np.int64)
    elif "t2d" in names:
        ids = np.flatnonzero(_read(draft, names["t2d"]).reshape(-1))
    else:
        return None
    source = names.get("d2t") or names.get("token_map") or names["t2d"]
    if rows is not None and len(ids) != rows:
        raise ConfigError(f"{where}: {source} maps {len(ids)} draft ids, lm_head.weight has {rows} rows")
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if outside.size:
        first = int(outside[0])
        raise ConfigError(
            f"{where}: {source} maps draft id {first} to {int(ids[first])}, outside the target's "
            f"vocabulary of {vocab_size}; {outside.size} of {len(ids)} ids are: the head is of another "
            "target, or damaged"
        )
    if len(np.unique(ids)) < len(ids):
        raise ConfigError(f"{where}: {source} maps two draft ids to one id of the target; it is damaged")
    if "t2d" in names and source != names["t2d"]:
        kept = np.flatnonzero(_read(draft, names["t2d"]).reshape(-1))
        if not np.array_equal(kept, np.sort(ids)):
            raise ConfigError(f"{where}: {source} and {names['t2d']} keep different ids; one is damaged")
    return None if np.array_equal(ids, np.arange(vocab_size)) else ids


def check_tokenizer(draft: Path, target: str, where: str) -> None:
    """Where both carry a tokenizer, refuse another one; ConfigError names the first id that differs."""
    theirs, ours = _vocabulary(draft / "tokenizer.json"), _vocabulary(Path(target) / "tokenizer.json")
    for index in sorted(theirs.keys() & ours.keys()):
        if theirs[index] != ours[index]:
            raise ConfigError(
                f"{where} was made for another tokenizer: its token {index} is {theirs[index]!r}, the "
                f"target's is {ours[index]!r}"
            )


def _vocabulary(file: Path) -> dict[int, str]:
    """Id -> token of a ``tokenizer.json``; empty where there is none that can be read."""
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        entries = content["model"]["vocab"]
        pairs = entries.items() if isinstance(entries, dict) else [(e[0], i) for i, e in enumerate(entries)]
        vocabulary = {index: token for token, index in pairs}
        added = content.get("added_tokens") or []
        return vocabulary | {token["id"]: token["content"] for token in added}
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return {}


def _read(draft: CheckpointInfo, stored: str) -> np.ndarray:
    from safetensors import safe_open

    for file in sorted(draft.path.glob("*.safetensors")):
        with safe_open(file, framework="np") as tensors:
            if stored in tensors.keys():  # noqa: SIM118  # the reader is no mapping
                return tensors.get_tensor(stored)
    raise ConfigError(f"{draft.path} holds no tensor {stored}")
