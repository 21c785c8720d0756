"""Files of entries: JSON lines, JSON lists and CSV, perhaps gzipped."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .contract import ConfigError


def read_entries(path: Path, *, field: str = "file") -> Iterator[Any]:
    """The entries of a file, in order; of CSV each line is a mapping.

    Args:
        field: what messages call ``path``.

    Raises:
        ConfigError: it cannot be read.
    """
    text = _text(path, field)
    if path.suffixes[-1:] == [".csv"] or path.suffixes[-2:] == [".csv", ".gz"]:
        csv.field_size_limit(sys.maxsize)  # an article is longer than the default
        yield from csv.DictReader(io.StringIO(text))
        return
    if text.lstrip().startswith("["):
        try:
            entries = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{field}: {path} is not JSON: {error}") from None
        yield from entries
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(
                    f"{field}: {path}, line {number} is not JSON: {error.msg} at column {error.colno}"
                ) from None


def _text(path: Path, field: str) -> str:
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{field}: {path} is not UTF-8 text (byte {error.start}); JSON, JSON lines and CSV can be read, "
            "convert other files first"
        ) from None
    except (OSError, EOFError) as error:
        raise ConfigError(
            f"{field}: cannot read {path}: {getattr(error, 'strerror', None) or error}"
        ) from None
