"""Remembered outputs in a file: numpy arrays in a zip archive, which holds no code and is checked as a whole.

The file holds what requests wrote, as token ids. Of their namespaces it has digests only, and it is readable
by its owner alone.
"""

from __future__ import annotations

import json
import os
import tempfile
import zipfile
import zlib
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from specdecode.contract import ConfigError

from .config import SuffixConfig
from .memory import DIGEST_BYTES, Output

FIELD = "speculative_config.suffix_decoding_cache_path"
_FORMAT, _VERSION = "specdec-suffix", 1
_REMEDY = "delete it, or give another path"


@attrs.frozen
class Origin:
    """What the outputs of a file come from; those of another are of no use, or not to be shown."""

    vocab_size: int
    shared: bool  #: the namespaces were shared


def origin_of(config: SuffixConfig, vocab_size: int) -> Origin:
    return Origin(vocab_size, config.suffix_decoding_share_namespaces)


def check_file(config: SuffixConfig, vocab_size: int) -> None:
    """Raises ConfigError if the file of ``config`` cannot be loaded, or could not be saved at the end."""
    path = Path(config.suffix_decoding_cache_path or "")
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        what = "is a folder" if path.is_dir() else f"cannot be written: {folder} is no folder that can"
        raise ConfigError(f"{FIELD}: {path} {what}; give the path of a file in a folder that is there")
    load_file(config, vocab_size)


def load_file(config: SuffixConfig, vocab_size: int) -> list[Output]:
    """The outputs in the file of ``config``; none if there is no file yet."""
    path = Path(config.suffix_decoding_cache_path or "")
    return load(path, origin_of(config, vocab_size)) if path.exists() else []


def save(path: Path, outputs: Sequence[Output], origin: Origin) -> None:
    """Write ``outputs`` in place of what is there; a reader finds the old file or the new one, whole.

    Raises:
        OSError: it cannot be written.
    """
    header = {"format": _FORMAT, "version": _VERSION, **attrs.asdict(origin)}
    tokens = np.fromiter((t for output in outputs for t in output.tokens), np.int32)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez_compressed(
                file,
                header=np.frombuffer(json.dumps(header).encode(), np.uint8),
                tokens=tokens,
                lengths=np.array([len(output.tokens) for output in outputs], np.int64),
                spaces=np.frombuffer(b"".join(output.space for output in outputs), np.uint8),
            )
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def load(path: Path, origin: Origin) -> list[Output]:
    """The outputs of a file.

    Raises:
        ConfigError: it cannot be read, is no whole file of this format, or is of another origin.
    """
    try:
        arrays = _read(path)
        header = json.loads(arrays["header"].tobytes())
        if not isinstance(header, dict) or header.get("format") != _FORMAT:
            raise ValueError("it has another header")
    except OSError as error:
        if not isinstance(error, zipfile.BadZipFile):
            raise ConfigError(f"{FIELD}: cannot read {path}: {error.strerror or error}; {_REMEDY}") from error
        raise
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        raise ConfigError(
            f"{FIELD}: {path} is damaged, or no file that suffix decoding saved ({error}); {_REMEDY}"
        ) from error
    if header.get("version") != _VERSION:
        raise ConfigError(
            f"{FIELD}: {path} is of version {header.get('version')}, this package reads {_VERSION}; {_REMEDY}"
        )
    _check_origin(path, header, origin)
    return _outputs(path, arrays, origin)


def _read(path: Path) -> dict[str, np.ndarray]:
    with open(path, "rb") as file:
        loaded: Any = np.load(file, allow_pickle=False)
        if not isinstance(loaded, np.lib.npyio.NpzFile):
            raise ValueError("it is a single array")
        with loaded:
            return {name: loaded[name] for name in ("header", "tokens", "lengths", "spaces")}


def _check_origin(path: Path, header: dict[str, Any], origin: Origin) -> None:
    if header.get("vocab_size") != origin.vocab_size:
        raise ConfigError(
            f"{FIELD}: {path} holds tokens of a vocabulary of {header.get('vocab_size')}, the target has "
            f"{origin.vocab_size}; give each model a file of its own"
        )
    if header.get("shared") is not False and not origin.shared:
        raise ConfigError(
            f"{FIELD}: {path} was saved with suffix_decoding_share_namespaces and does not know whose text "
            f"is whose; set suffix_decoding_share_namespaces, or {_REMEDY}"
        )


def _outputs(path: Path, arrays: dict[str, np.ndarray], origin: Origin) -> list[Output]:
    tokens, lengths, spaces = arrays["tokens"], arrays["lengths"], arrays["spaces"]
    sound = (
        (tokens.dtype, lengths.dtype, spaces.dtype) == (np.int32, np.int64, np.uint8)
        and tokens.ndim == lengths.ndim == spaces.ndim == 1
        and spaces.size == DIGEST_BYTES * lengths.size
        and bool((lengths > 0).all())
        and int(lengths.sum()) == tokens.size
        and (not tokens.size or (tokens.min() >= 0 and tokens.max() < origin.vocab_size))
    )
    if not sound:
        raise ConfigError(f"{FIELD}: {path} is damaged: its arrays do not fit together; {_REMEDY}")
    names = spaces.tobytes()
    ends = lengths.cumsum().tolist()
    return [
        Output(
            names[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES],
            array("i", tokens[end - length : end].tobytes()),
        )
        for number, (end, length) in enumerate(zip(ends, lengths.tolist(), strict=True))
    ]
