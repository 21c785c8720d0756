"""What a request says of its structure, and the engine's defaults for it. Names are vLLM's."""

from __future__ import annotations

import copy
import functools
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from specdecode.contract import ConfigError, option, within

logger = logging.getLogger(__name__)

#: The kinds of structure; a request names one of them.
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")

#: How to call the field in messages.
FIELD = "structured_outputs"

#: Characters of a structure, unless the engine says otherwise. Where all of them are fixed text, it takes
#: llguidance about a millisecond a thousand of them to find the tokens that go on from a place.
MAX_SIZE = 1 << 16

#: What is wrong with a schema that Python's own limit of recursion ends.
TOO_DEEP = "must be a JSON schema, got one that is nested too deeply"


def _schema(value: Any) -> Any:
    """A copy, so that its owner may go on editing."""
    if not isinstance(value, Mapping):
        return value
    try:
        return copy.deepcopy(dict(value))
    except RecursionError:
        raise ConfigError(f"{FIELD}.json {TOO_DEEP}") from None


def _strings(value: Any) -> Any:
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else value


def _unless_false(value: Any) -> Any:
    return None if value is False else value


@attrs.frozen(kw_only=True)
class StructuredOutputsParams:
    """The structure of one request's output: exactly one of the kinds, and options of JSON.

    Raises:
        ConfigError: names every bad field, its value and the remedy.
    """

    #: JSON schema: a mapping, or JSON text
    json: str | dict[str, Any] | None = attrs.field(default=None, converter=_schema)
    #: regular expression that the whole output matches (Rust's syntax: no look-around)
    regex: str | None = None
    #: texts of which the output is one
    choice: tuple[str, ...] | None = attrs.field(default=None, converter=_strings)
    #: context-free grammar: Lark, or GBNF whose first rule is ``root``
    grammar: str | None = None
    #: any JSON object
    json_object: bool | None = attrs.field(default=None, converter=_unless_false)
    #: refused: it is not built
    structural_tag: str | None = None
    #: there is one library and never a fallback
    disable_fallback: bool = False
    #: JSON without any whitespace between its tokens
    disable_any_whitespace: bool = False
    #: objects of the schema have no properties but those it names, where it does not say
    disable_additional_properties: bool = False
    #: regular expression of the whitespace between JSON's tokens; None: any amount
    whitespace_pattern: str | None = None

    def __attrs_post_init__(self) -> None:
        faults = [f"{FIELD}{fault}" for fault in (*self._kind_faults(), *self._option_faults())]
        if faults:
            raise ConfigError(*faults)

    @property
    def kind(self) -> str:
        """The one of :data:`KINDS` that is set."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    @classmethod
    def of(cls, value: Any, field: str = FIELD) -> StructuredOutputsParams:
        """From what a user gave: an instance, or a mapping of its fields.

        Raises:
            ConfigError: neither, an unknown key, or a bad value.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(f"{field} must be a StructuredOutputsParams or a mapping, got {value!r}")
        known = {attribute.name for attribute in attrs.fields(StructuredOutputsParams)}
        if unknown := [key for key in value if key not in known]:
            raise ConfigError(
                *(f"{field}.{key} is not known: it has {', '.join(sorted(known))}" for key in unknown)
            )
        return cls(**value)

    # -- checks ---------------------------------------------------------------------------------
    def _kind_faults(self) -> Iterator[str]:
        named = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(named) != 1:
            given = f"got {', '.join(named)}" if named else "got none"
            yield f" must name one of {', '.join(KINDS[:-1])}, {given}"
        for kind in named:
            if fault := _CHECKS[kind](getattr(self, kind)):
                yield f".{kind} {fault}"

    def _option_faults(self) -> Iterator[str]:
        for name in ("disable_fallback", "disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(value := getattr(self, name), bool):
                yield f".{name} must be True or False, got {value!r}"
        pattern = self.whitespace_pattern
        if pattern is not None and (not isinstance(pattern, str) or not pattern):
            yield f".whitespace_pattern must be a regular expression, got {pattern!r}"
        if self.disable_any_whitespace and pattern is not None:
            yield f".whitespace_pattern={pattern!r} contradicts disable_any_whitespace=True: keep one of them"
        for name, kinds in _SERVES.items():
            if (value := getattr(self, name)) and all(getattr(self, kind) is None for kind in kinds):
                yield f".{name}={value!r} has a meaning for {' and '.join(kinds)} only: leave it out"


#: Options that say something of some kinds only.
_SERVES = {
    "whitespace_pattern": ("json", "json_object"),
    "disable_any_whitespace": ("json", "json_object"),
    "disable_additional_properties": ("json",),
}


def _json_fault(value: Any) -> str | None:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            return f"must be a JSON schema, got {value!r}, which is no JSON: {error}"
        except RecursionError:
            return TOO_DEEP
    else:
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            return f"must be a JSON schema, got {value!r}, which JSON cannot hold: {error}"
    return None if isinstance(value, dict | bool) else f"must be a JSON schema, an object, got {value!r}"


def _text_fault(what: str, value: Any) -> str | None:
    return None if isinstance(value, str) and value.strip() else f"must be {what}, got {value!r}"


def _choice_fault(value: Any) -> str | None:
    fine = isinstance(value, tuple) and value and all(isinstance(text, str) and text for text in value)
    return None if fine else f"must be a list of strings, none of them empty, got {value!r}"


_CHECKS: dict[str, Callable[[Any], str | None]] = {
    "json": _json_fault,
    "regex": lambda value: (
        None if isinstance(value, str) and value else f"must be a regular expression, got {value!r}"
    ),
    "choice": _choice_fault,
    "grammar": functools.partial(_text_fault, "a grammar as text, Lark or GBNF"),
    "json_object": lambda value: None if value is True else f"must be True or False, got {value!r}",
    "structural_tag": lambda value: "is not built: write the whole output as a grammar",
}


@attrs.frozen(kw_only=True)
class GuidedDecodingParams(StructuredOutputsParams):
    """The old spelling of :class:`StructuredOutputsParams`; ``backend`` has no effect: there is one."""

    backend: str | None = None


def from_guided(value: Any) -> StructuredOutputsParams:
    """``guided_decoding`` as today's class, with one warning that prints what to write instead.

    Raises:
        ConfigError: it cannot be read.
    """
    if type(value) is StructuredOutputsParams:
        return value
    if isinstance(value, Mapping):
        value = {key: entry for key, entry in value.items() if key != "backend"}
    today = StructuredOutputsParams(**_said(StructuredOutputsParams.of(value, "guided_decoding")))
    said = ", ".join(f"{name}={entry!r}" for name, entry in _said(today).items())
    _warn_once(f"guided_decoding is an old spelling; write {FIELD}=StructuredOutputsParams({said})")
    return today


@functools.lru_cache(maxsize=256)
def _warn_once(message: str) -> None:
    logger.warning("%s", message)


def _said(params: StructuredOutputsParams) -> dict[str, Any]:
    """What differs from the defaults."""
    return {
        attribute.name: value
        for attribute in attrs.fields(StructuredOutputsParams)
        if (value := getattr(params, attribute.name)) != attribute.default
    }


def _never(remedy: str) -> Any:
    def check(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value != attribute.default:
            raise ValueError(f"must be {attribute.default!r} in this version, got {value!r}: {remedy}")

    return check


def _our_backend(_: Any, __: Any, value: str) -> None:
    if value not in ("auto", "guidance"):
        raise ValueError(f"must be 'auto' or 'guidance', which are the same here, got {value!r}")


@attrs.frozen(kw_only=True)
class StructuredOutputsConfig:
    """The engine's defaults; what a request says of its own comes first."""

    backend: str = option("auto or guidance: llguidance", default="auto", validator=_our_backend)
    disable_fallback: bool = option("there is never a fallback", default=False)
    disable_any_whitespace: bool = option("JSON without whitespace between its tokens", default=False)
    disable_additional_properties: bool = option(
        "objects have no properties but those that their schema names, where it does not say", default=False
    )
    max_size: int = option(
        "most characters of a regex, a grammar, a text of a choice, a schema without titles and descriptions",
        default=MAX_SIZE,
        validator=within(1),
    )
    reasoning_parser: str = option(
        "not built", default="", validator=_never("reasoning is not told apart from the answer")
    )
    enable_in_reasoning: bool = option(
        "not built", default=False, validator=_never("reasoning is not told apart from the answer")
    )
