"""Tokenizers of models, through transformers."""

from __future__ import annotations

from typing import Any

from ..tokenizer_files import TokenizerFiles
from .files import ModelFiles


def tokenizer_of(
    files: ModelFiles, tokenizer: str | None = None, mode: str = "auto", trust_remote_code: bool = False
) -> TokenizerFiles:
    """Where the model's tokenizer is, or that of another model; arguments as of :class:`TokenizerFiles`."""
    return TokenizerFiles(path=files.path, other=tokenizer, mode=mode, trust_remote_code=trust_remote_code)


def load_tokenizer(
    files: ModelFiles, tokenizer: str | None = None, mode: str = "auto", trust_remote_code: bool = False
) -> Any:
    """It, loaded: a transformers fast tokenizer.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    return tokenizer_of(files, tokenizer, mode, trust_remote_code).load()
