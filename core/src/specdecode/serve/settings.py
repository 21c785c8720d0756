"""What a server is started with, apart from its engine."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import attrs

from ..contract import ConfigError, option, within
from ..lora.request import LoRARequest
from .parsers import REASONING_PARSERS, TOOL_PARSERS


def _positive(_: object, __: object, value: float | None) -> None:
    if value is not None and not value > 0:
        raise ValueError(f"must be above 0, got {value!r}")


def _named(known: Collection[str]) -> Any:
    def check(_: object, __: object, value: str | None) -> None:
        if value is not None and value not in known:
            raise ValueError(f"must be one of {', '.join(known)}, got {value!r}")

    return check


@attrs.frozen(kw_only=True)
class ApiKey:
    """A key that may use the server, and whose: logs and the draft memory know it by ``namespace``."""

    secret: str = attrs.field(repr=False)

    @property
    def namespace(self) -> str:
        """Tells the keys apart without telling them."""
        return hashlib.sha256(self.secret.encode()).hexdigest()[:16]

    def matches(self, given: str) -> bool:
        return hmac.compare_digest(self.secret.encode(), given.encode("utf-8", "surrogateescape"))


@attrs.frozen(kw_only=True)
class ServerSettings:
    """How requests are served. Times are seconds.

    Raises:
        ConfigError: a value is out of its range.
    """

    served_model_name: tuple[str, ...] = option(
        "names that requests may call the model; none: the last part of its path", default=()
    )
    adapters: tuple[LoRARequest, ...] = option(
        "adapters that requests may ask for, by their names in place of the model's", default=()
    )
    api_keys: tuple[ApiKey, ...] = option(
        "who may use /v1; each has a prefix cache and a draft memory of its own; none: everybody may",
        default=(),
    )
    admin_key: ApiKey | None = option(
        "who may reset the prefix cache, and pause the engine; none: nobody", default=None
    )
    reasoning_parser: str | None = option(
        "how reasoning is told from the answer; none: not at all",
        default=None,
        validator=_named(REASONING_PARSERS),
    )
    tool_call_parser: str | None = option(
        "how tool calls look in the model's text; none: they stay text",
        default=None,
        validator=_named(TOOL_PARSERS),
    )
    chat_template: str | None = option("Jinja text; none: the tokenizer's own", default=None)
    max_body_bytes: int = option("largest request", default=16 << 20, validator=within(1))
    body_timeout: float = option("for a request's body to arrive", default=30.0, validator=_positive)
    request_timeout: float | None = option(
        "for a request to be answered; none: as long as it takes", default=None, validator=_positive
    )
    max_completions: int = option("most completions of one request", default=256, validator=within(1))
    max_waiting: int | None = option(
        "requests that may be open, running and waiting; more are refused; none: no limit",
        default=None,
        validator=within(1),
    )
    stuck_after: float = option(
        "that a step may take before /health fails", default=120.0, validator=_positive
    )

    def __attrs_post_init__(self) -> None:
        for field in attrs.fields(ServerSettings):
            if isinstance(value := getattr(self, field.name), str) and not value:
                raise ConfigError(f"{field.name} must not be empty")
        names = [*self.served_model_name, *(adapter.lora_name for adapter in self.adapters)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"{', '.join(twice)} is served twice: give each model and adapter its own name")

    def key_of(self, authorization: str | None) -> ApiKey | None:
        """The API key that an ``Authorization`` header carries."""
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        return next((key for key in self.api_keys if key.matches(token.strip())), None)


def read_adapters(given: Sequence[str]) -> tuple[LoRARequest, ...]:
    """Adapters of a command line, ``NAME=PATH`` each, numbered from 1.

    Raises:
        ConfigError: one is not of that form.
    """
    pairs = [text.partition("=") for text in given]
    for text, (name, _, path) in zip(given, pairs, strict=True):
        if not name or not path:
            raise ConfigError(f"lora-modules must be NAME=PATH, got {text!r}")
    return tuple(LoRARequest(name, number, path) for number, (name, _, path) in enumerate(pairs, 1))


def read_keys(given: Sequence[str], file: Path | None) -> tuple[ApiKey, ...]:
    """Keys of a command line and of a file that has one a line; ``#`` begins a comment.

    Raises:
        ConfigError: the file cannot be read, or a key is empty or holds blanks.
    """
    lines: list[str] = []
    if file is not None:
        try:
            lines = [line.partition("#")[0].strip() for line in file.read_text("utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"api-key-file: cannot read {file}: {error}") from None
        lines = [line for line in lines if line]
        if not lines:
            raise ConfigError(f"api-key-file: {file} holds no key; write one a line")
    secrets = [*given, *lines]
    if any(not secret or not secret.isascii() or secret.split() != [secret] for secret in secrets):
        raise ConfigError("api-key must be ASCII text without blanks; one that was given is not")
    return tuple(ApiKey(secret=secret) for secret in dict.fromkeys(secrets))
