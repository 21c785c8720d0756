"""Where a model's tokenizer is: told without torch or transformers, read when it is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs

from .contract import ConfigError, TokenizerEntries
from .heads.tokenizers import read_entries

MODES = ("auto", "fast", "hf")


@attrs.frozen(kw_only=True)
class TokenizerFiles:
    """A model's tokenizer, or that of another model (:class:`specdecode.contract.TargetTokenizer`)."""

    path: Path  #: the model's directory
    other: str | None = None  #: directory, ``.gguf`` file or hub id of another tokenizer
    mode: str = "auto"  #: one of MODES, which are all the same: there are no slow ones
    trust_remote_code: bool = False

    def load(self) -> Any:
        """A fast tokenizer of transformers, a new one each time.

        Raises:
            ConfigError: there is none, or it cannot be read.
        """
        if self.mode not in MODES:
            raise ConfigError(f"tokenizer_mode must be one of {', '.join(MODES)}, got {self.mode!r}")
        from transformers import AutoTokenizer

        path = self._folder()
        try:
            found = AutoTokenizer.from_pretrained(path, trust_remote_code=self.trust_remote_code)
            template = path / "chat_template.json"  # where models that take images keep it
            if not found.chat_template and template.is_file():
                found.chat_template = json.loads(template.read_text("utf-8"))["chat_template"]
            return found
        except Exception as error:  # transformers documents no set of errors for what the files may hold
            raise ConfigError(
                f"{path} has no tokenizer that can be read ({error}); name another with tokenizer=, "
                "or set skip_tokenizer_init=True and give token ids"
            ) from error

    def entries(self) -> TokenizerEntries | None:
        """What the files say; None: they do not say it."""
        return read_entries(self._folder())

    def _folder(self) -> Path:
        """A directory with a tokenizer of its own needs no model beside it."""
        if self.other is None:
            return self.path
        directory = Path(self.other).expanduser()
        if (directory / "tokenizer.json").is_file():
            return directory
        from .models import resolve_model

        return resolve_model(self.other, trust_remote_code=self.trust_remote_code).path
