"""Reduced draft vocabularies, judged before any weight is loaded."""

from __future__ import annotations

import numpy as np

from ..contract import CheckpointInfo, ConfigError
from ..plugins.pickles import pickled_array, pickled_files

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
    if draft.dummy:  # any will do
        some = rows is not None and rows < vocab_size
        return np.arange(rows) * (vocab_size // rows) if some and rows is not None else None
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


def _read(draft: CheckpointInfo, stored: str) -> np.ndarray:
    from safetensors import safe_open

    files = sorted(draft.path.glob("*.safetensors"))
    for file in () if files else pickled_files(draft.path):
        if (array := pickled_array(file, stored)) is not None:
            return array
    for file in files:
        with safe_open(file, framework="np") as tensors:
            if stored in tensors.keys():  # noqa: SIM118  # the reader is no mapping
                return tensors.get_tensor(stored)
    raise ConfigError(f"{draft.path} holds no tensor {stored}")
