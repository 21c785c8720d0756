"""Weights that ``torch.save`` pickled: their headers, read without torch and without running anything.

A pickle may name any function. Here the few that stand for tensors are replaced by ones that only keep a
shape, and all others are refused; the weights themselves are read later, with ``weights_only=True``.
"""

from __future__ import annotations

import collections
import io
import json
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from specdecode.contract import ConfigError, TensorInfo

if TYPE_CHECKING:
    import numpy as np

_SINGLE = "pytorch_model.bin"
_INDEX = "pytorch_model.bin.index.json"
#: What a training run leaves beside its weights.
_NOT_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state", "scaler")
_STORAGES = {
    "BoolStorage": "bool",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ShortStorage": "int16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
}


def pickled_files(folder: Path) -> list[Path]:
    """The pickled weights of a checkpoint directory; empty if there are none.

    Raises:
        ConfigError: there are several and no index says which belong together, or one of them is missing.
    """
    if (folder / _INDEX).is_file():
        try:
            names = sorted(set(json.loads((folder / _INDEX).read_text("utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{folder / _INDEX} cannot be read: {error}; fetch it again") from error
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise ConfigError(f"{folder / _INDEX} names {', '.join(missing)}, missing there; fetch it again")
        return [folder / name for name in names]
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    found = [
        file
        for file in sorted([*folder.glob("*.bin"), *folder.glob("*.pt")])
        if not file.name.startswith(_NOT_WEIGHTS)
    ]
    if len(found) > 1:
        shown = ", ".join(file.name for file in found)
        raise ConfigError(f"{folder} holds several pickles ({shown}); keep the one with the weights")
    return found


def pickled_headers(file: Path) -> Iterator[tuple[str, TensorInfo]]:
    """Name, shape and dtype of the tensors of a file of ``torch.save``.

    Raises:
        ConfigError: it cannot be read, or holds something else than tensors.
    """
    for name, tensor in _read(file)[1].items():
        yield name, TensorInfo(tensor.shape, tensor.storage.dtype)


def pickled_array(file: Path, name: str) -> np.ndarray | None:
    """One tensor of integers or bools, contiguous as stored; None if the file has none of that name.

    Raises:
        ConfigError: as :func:`pickled_headers`, or its dtype is none of numpy's.
    """
    record, tensors = _read(file)
    tensor = tensors.get(name)
    if tensor is None:
        return None
    import numpy as np

    try:
        with zipfile.ZipFile(file) as archive:
            raw = archive.read(f"{record.removesuffix('data.pkl')}data/{tensor.storage.key}")
        flat = np.frombuffer(raw, tensor.storage.dtype)
        count = int(np.prod(tensor.shape))
        return flat[tensor.offset : tensor.offset + count].reshape(tensor.shape)
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise ConfigError(f"{name} of {file} cannot be read: {error}") from error


def _read(file: Path) -> tuple[str, dict[str, _Tensor]]:
    """The record with the tree of objects, and its tensors."""
    try:
        with zipfile.ZipFile(file) as archive:
            record = next(name for name in archive.namelist() if name.endswith("data.pkl"))
            content = _Headers(io.BytesIO(archive.read(record))).load()
    except (zipfile.BadZipFile, StopIteration):
        raise ConfigError(
            f"{file} is no pickle of torch 1.6 or later: fetch it again, or save it again with torch.save"
        ) from None
    except (pickle.UnpicklingError, OSError, EOFError, ValueError, TypeError, LookupError) as error:
        raise ConfigError(f"{file} cannot be read: {error}; fetch it again, or save its tensors") from error
    if not isinstance(content, Mapping) or not all(isinstance(t, _Tensor) for t in content.values()):
        raise ConfigError(f"{file} must hold a mapping from names to tensors: save a state_dict")
    return record, {str(name): tensor for name, tensor in content.items()}


@attrs.frozen
class _Storage:
    dtype: str
    key: str


@attrs.frozen
class _Tensor:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]


def _rebuild_tensor(storage: _Storage, offset: int, shape: tuple[int, ...], *_: Any) -> _Tensor:
    return _Tensor(storage, int(offset), tuple(int(size) for size in shape))


def _rebuild_parameter(tensor: _Tensor, *_: Any) -> _Tensor:
    return tensor


_KNOWN: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("collections", "OrderedDict"): collections.OrderedDict,
}


class _Headers(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a tensor")

    def persistent_load(self, key: Any) -> _Storage:
        if not isinstance(key, tuple) or len(key) < 3 or key[0] != "storage" or not isinstance(key[1], str):
            raise pickle.UnpicklingError(f"it refers to {key!r}, which is no storage of a tensor")
        return _Storage(key[1], str(key[2]))
