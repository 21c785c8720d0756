"""Tokenizers, through transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs

from specdecode.contract import ConfigError, TokenizerEntries

from ..heads.tokenizers import read_entries
from .files import ModelFiles, resolve_model

MODES = ("auto", "fast")


def load_tokenizer(
    files: ModelFiles, tokenizer: str | None = None, mode: str = "auto", trust_remote_code: bool = False
) -> Any:
    """The model's tokenizer, or that of another model: a transformers fast tokenizer.

    Args:
        tokenizer: directory, ``.gguf`` file or hub id of another tokenizer; None: the model's own.
        mode: "auto" or "fast", which are the same: there are no slow ones.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    if mode not in MODES:
        raise ConfigError(f"tokenizer_mode must be one of {', '.join(MODES)}, got {mode!r}")
    from transformers import AutoTokenizer

    path = files.path if tokenizer is None else _locate(tokenizer, trust_remote_code)
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers documents no set of errors for what the files may hold
        raise ConfigError(
            f"{path} has no tokenizer that can be read ({error}); name another with tokenizer=, "
            "or set skip_tokenizer_init=True and give token ids"
        ) from error


@attrs.frozen(kw_only=True)
class TokenizerFiles:
    """What :func:`load_tokenizer` is given, for later (:class:`specdecode.contract.TargetTokenizer`)."""

    files: ModelFiles
    tokenizer: str | None = None
    mode: str = "auto"
    trust_remote_code: bool = False

    def load(self) -> Any:
        return load_tokenizer(self.files, self.tokenizer, self.mode, self.trust_remote_code)

    def entries(self) -> TokenizerEntries | None:
        other = self.tokenizer
        return read_entries(self.files.path if other is None else _locate(other, self.trust_remote_code))


def _locate(tokenizer: str, trust_remote_code: bool) -> Path:
    """A directory with a tokenizer of its own needs no model beside it."""
    directory = Path(tokenizer).expanduser()
    if (directory / "tokenizer.json").is_file():
        return directory
    return resolve_model(tokenizer, trust_remote_code=trust_remote_code).path
