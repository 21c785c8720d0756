"""Reading safetensors checkpoints: where each tensor lies, or tensor by tensor."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import attrs
import torch

from specdecode.contract import ConfigError

from ..distributed.shares import Share
from ..plugins.pickles import pickled_files

INDEX = "model.safetensors.index.json"

#: The format's names of dtypes.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@attrs.frozen(kw_only=True)
class StoredTensor:
    """A tensor of a checkpoint, not read yet: contiguous and little-endian, from a byte of its file on."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    num_bytes: int
    index: tuple[slice, ...] = ()  #: of a part: which of the whole tensor
    stride: int | None = None  #: of a part: bytes from one row to the next, where there is a gap between

    def part(self, share: Share) -> StoredTensor:
        """Some rows or columns of it, which are read alone."""
        row = self.num_bytes // self.shape[0]
        size = self.dtype.itemsize
        shape = (*self.shape[: share.dim], share.size, *self.shape[share.dim + 1 :])
        return attrs.evolve(
            self,
            shape=shape,
            offset=self.offset + share.start * (size if share.dim else row),
            num_bytes=math.prod(shape) * size,
            index=share.index,
            stride=row if share.dim else None,
        )

    def map(self) -> torch.Tensor:
        """The tensor, on the CPU; what is not looked at stays in its file."""
        whole = torch.from_file(str(self.file), size=self.file.stat().st_size, dtype=torch.uint8)
        return whole[self.offset : self.offset + self.num_bytes].view(self.dtype).view(self.shape)


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint directory; ConfigError if one or all are missing."""
    if (path / INDEX).is_file():
        names = sorted(set(_read_json(path / INDEX).get("weight_map", {}).values()))
        missing = [name for name in names if not (path / name).is_file()]
        if missing:
            raise ConfigError(
                f"{path / INDEX} names {len(names)} weight files and {', '.join(missing)} is missing; "
                "fetch the checkpoint again or copy what is missing"
            )
        if not names:
            raise ConfigError(f"{path / INDEX} names no weight file; fetch the checkpoint again")
        return [path / name for name in names]
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    found = sorted(path.glob("*.safetensors"))
    if not found:
        pickled = sorted(path.glob("*.bin")) + sorted(path.glob("*.pt"))
        remedy = (
            f"only pickled weights are there ({pickled[0].name}): save them again as safetensors"
            if pickled
            else "fetch the weights, or use load_format='dummy' for random ones"
        )
        raise ConfigError(f"model directory {path} has no safetensors file; {remedy}")
    return found


def load_weights(
    path: str | Path, names: Collection[str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """``(name, tensor)`` of a checkpoint directory's tensors, on the CPU, one at a time.

    From safetensors; where there are none, from pickled weights.

    Args:
        names: of the tensors that are read; None: all.
    """
    path = Path(path)
    pickles = [] if any(path.glob("*.safetensors")) else pickled_files(path)
    for file in pickles:
        # Mapped, so that only what is asked for is read; and nothing but tensors is unpickled.
        stored = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        yield from ((name, tensor) for name, tensor in stored.items() if names is None or name in names)
    for file in () if pickles else weight_files(path):
        with open_weights(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 (a safetensors handle is no mapping)
                if names is None or name in names:
                    yield name, tensors.get_tensor(name)


def stored_tensors(path: str | Path) -> Iterator[StoredTensor]:
    """Every tensor of a checkpoint directory, from the headers of its files.

    Raises:
        ConfigError: a file is missing or damaged, or holds a dtype that torch has not.
    """
    for file in weight_files(Path(path)):
        yield from stored_in(file)


def stored_in(file: Path) -> Iterator[StoredTensor]:
    """Every tensor of one safetensors file, in the order in which they lie there; raises as the above."""
    with open_weights(file):  # checks the header, and that the file is as long as it says
        pass
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
    header.pop("__metadata__", None)
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"][0]):
        if entry["dtype"] not in _DTYPES:
            raise ConfigError(
                f"tensor {name} of weight file {file} has dtype {entry['dtype']}, which is not "
                "supported: use a checkpoint in float32, bfloat16 or float16"
            )
        begin, end = entry["data_offsets"]
        yield StoredTensor(
            name=name,
            file=file,
            shape=tuple(entry["shape"]),
            dtype=_DTYPES[entry["dtype"]],
            offset=8 + size + begin,
            num_bytes=end - begin,
        )


@contextlib.contextmanager
def open_weights(file: Path) -> Iterator[Any]:
    """The handle of a safetensors file, on the CPU; ConfigError if it is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        handle = safe_open(str(file), framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"weight file {file} is truncated or damaged ({error}); fetch it again") from error
    with handle as tensors:
        yield tensors


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold a JSON object, got {type(content).__name__}")
    return content
