"""A draft checkpoint's config and tensor headers, read without its weights and without torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specdecode.contract import CheckpointInfo, ConfigError, TensorInfo

from .pickles import pickled_files, pickled_headers

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
#: Files that may hold weights, or name those that do.
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.index.json")

_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "U16": "uint16",
    "I32": "int32",
    "U32": "uint32",
    "I64": "int64",
    "U64": "uint64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}


def read_checkpoint(
    path: str | Path,
    revision: str | None = None,
    *,
    field: str = "speculative_config.model",
    dummy: bool = False,
) -> CheckpointInfo:
    """The config and the tensor headers of a draft checkpoint.

    Args:
        path: a directory with ``config.json`` and safetensors files, or pickled weights where there are
            none, or a hub id that the local cache holds.
        revision: branch, tag or commit of a hub id.
        field: what messages call the value.
        dummy: random weights will do where there are none.

    Raises:
        ConfigError: there is no such checkpoint here, or it cannot be read; says which file and what to do.
    """
    folder = locate(path, revision, field)
    config = _read_json(folder / CONFIG, field)
    if dummy and not any(file for pattern in _WEIGHTS for file in folder.glob(pattern)):
        return CheckpointInfo(path=folder, config=config, tensors={}, dummy=True)
    tensors = {name: info for file in _weight_files(folder, field) for name, info in _headers(file, field)}
    return CheckpointInfo(path=folder, config=config, tensors=tensors)


def locate(path: str | Path, revision: str | None, field: str) -> Path:
    """The directory of a checkpoint, given or of a hub id in the local cache; ConfigError: there is none."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_file():
        raise ConfigError(
            f"{field} must be a directory with {CONFIG} and safetensors files, got the file {path}"
        )
    if folder.is_absolute() or str(path).startswith("."):  # no hub id begins so
        raise ConfigError(f"{field} {str(path)!r} does not exist; give the directory that holds it")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(path), revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError) as error:
        at = f" at revision {revision!r}" if revision else ""
        raise ConfigError(
            f"{field} {str(path)!r}{at} is neither a directory nor in the local hub cache; "
            f"give a path, or fetch it first: hf download {path}"
        ) from error


def _read_json(file: Path, field: str) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{field}: {file} does not exist; a draft checkpoint needs it") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{field}: {file} is not valid JSON: {error}; fetch it again") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{field}: {file} must hold a JSON object, got {type(value).__name__}")
    return value


def _weight_files(folder: Path, field: str) -> list[Path]:
    if (folder / INDEX).is_file():
        shards = _read_json(folder / INDEX, field).get("weight_map")
        if not isinstance(shards, dict):
            raise ConfigError(f"{field}: {folder / INDEX} has no weight_map; fetch it again")
        files = [folder / name for name in sorted(set(shards.values()))]
        if missing := [file.name for file in files if not file.is_file()]:
            raise ConfigError(
                f"{field}: {INDEX} names {', '.join(missing)}, missing in {folder}; fetch it again"
            )
        return files
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    try:
        files = sorted(folder.glob("*.safetensors")) or pickled_files(folder)
    except ConfigError as error:
        raise ConfigError(f"{field}: {error}") from None
    if not files:
        raise ConfigError(f"{field}: {folder} holds no safetensors file, and no pickled weights")
    return files


def _headers(file: Path, field: str) -> Iterator[tuple[str, TensorInfo]]:
    from safetensors import SafetensorError, safe_open

    if file.suffix != ".safetensors":
        try:
            yield from pickled_headers(file)
        except ConfigError as error:
            raise ConfigError(f"{field}: {error}") from error
        return
    try:
        with safe_open(file, framework="np") as weights:
            for name in weights.keys():  # noqa: SIM118  # the reader is no mapping
                header = weights.get_slice(name)
                kind = header.get_dtype()
                yield name, TensorInfo(tuple(header.get_shape()), _DTYPES.get(kind, kind.lower()))
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{field}: {file} cannot be read: {error}; fetch it again") from error
