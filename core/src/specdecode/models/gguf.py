"""GGUF files: converted once into a safetensors checkpoint in the cache directory."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specdecode.contract import ConfigError

logger = logging.getLogger(__name__)

#: Raised whenever a converted checkpoint would come out differently.
_FORMAT = 1
#: In a converted checkpoint, the file it was made of.
_SOURCE = "gguf_source.txt"


def gguf_source(checkpoint: Path) -> Path | None:
    """The GGUF file that a converted checkpoint was made of; None if it is none, or the file is gone."""
    try:
        file = Path((checkpoint / _SOURCE).read_text(encoding="utf-8"))
    except OSError:
        return None
    return file if file.is_file() else None


def cache_directory() -> Path:
    """``$SPECDECODE_CACHE``, or ``specdecode`` in the user's cache directory."""
    if root := os.environ.get("SPECDECODE_CACHE"):
        return Path(root).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "specdecode"


def convert_gguf(file: Path) -> Path:
    """The Hugging Face checkpoint made of a GGUF file: float32 weights, config, tokenizer, generation config.

    Converted by transformers at the first call, which takes from half a minute on; found again by
    the file's path, size and time of change. Whoever sees the directory sees it complete: it is
    written beside and renamed.

    Raises:
        ConfigError: the file is damaged, its architecture is unknown, or a package is missing.
    """
    file = file.resolve()
    status = file.stat()
    key = hashlib.sha256(f"{_FORMAT}\0{file}\0{status.st_size}\0{status.st_mtime_ns}".encode()).hexdigest()
    target = cache_directory() / "gguf" / f"{file.stem}-{key[:16]}"
    if target.is_dir():
        if gguf_source(target) is None:
            (target / _SOURCE).write_text(str(file), encoding="utf-8")
        return target
    reader = _checked(file)
    logger.warning("converting %s for its first use, which may take a minute; kept in %s", file.name, target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".converting-", dir=target.parent) as scratch:
            converted = Path(scratch) / "checkpoint"
            with _read_once(reader):
                _convert(file, converted)
            (converted / _SOURCE).write_text(str(file), encoding="utf-8")
            try:
                converted.rename(target)
            except OSError:
                if not target.is_dir():  # else another process was faster
                    raise
    except OSError as error:
        raise ConfigError(
            f"{file} could not be converted into {target} ({error}); free some space, "
            "or set SPECDECODE_CACHE to a directory that can be written"
        ) from error
    return target


def _checked(file: Path) -> Any:
    """The file's reader, all headers read: a truncated file is found before transformers trips over it."""
    try:
        import accelerate  # noqa: F401 (transformers needs it to load GGUF)
        from gguf import GGUFReader
    except ImportError as error:
        raise ConfigError(
            f"reading {file.name} needs the packages gguf and accelerate: pip install 'specdec-core[gguf]'"
        ) from error
    try:
        return GGUFReader(file)
    except Exception as error:  # numpy's and the reader's own, depending on where the file ends
        raise ConfigError(
            f"GGUF file {file} ({file.stat().st_size} bytes) is truncated or damaged: {error}; fetch it again"
        ) from error


@contextlib.contextmanager
def _read_once(reader: Any) -> Iterator[None]:
    """transformers reads the headers anew for the config, the tokenizer and the weights; the vocabulary alone
    takes seconds each time. Here it is given those that were read before.
    """
    import gguf

    package: Any = gguf
    reads, package.GGUFReader = package.GGUFReader, lambda *_: reader
    try:
        yield
    finally:
        package.GGUFReader = reads


def _convert(file: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise ConfigError(f"GGUF file {file} cannot be read by transformers: {error}") from error
    # The weights are plain float32 now; save_pretrained must not take the model for a quantized one.
    for owner in (model, model.config):
        for name in ("hf_quantizer", "is_quantized", "quantization_method", "quantization_config"):
            vars(owner).pop(name, None)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
