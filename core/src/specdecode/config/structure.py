"""Mapping -> attrs class, strictly and with every fault at once.

Values keep their type: ``"3"`` is no integer, nor are ``2.5`` and ``True``; only an integer given for a
number is widened. cattrs finds the hook for each type; the hooks in ``values`` say what is accepted.
Fields are validated one by one on a half-built instance, because attrs itself stops at the first
validator that raises.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from specdecode.contract import ConfigError

from .fields import attributes_of, default_of, hints_of
from .values import Fault, Invalid, strict_converter

if TYPE_CHECKING:
    from cattrs import Converter

T = TypeVar("T")


def structure(cls: type[T], mapping: Mapping[str, Any], path: str, *, neighbours: Iterable[str] = ()) -> T:
    """An instance of ``cls`` made from ``mapping``.

    Args:
        cls: an attrs class; its fields, with types and validators, say what is accepted.
        mapping: key -> value, as it comes from Python or JSON.
        path: what to call the mapping in messages, for example ``speculative_config``.
        neighbours: keys that other parts own and a user may have meant: for suggestions only.

    Raises:
        ConfigError: one fault for each unknown, missing or wrong key, each starting with its path.
    """
    try:
        instance: T = _structure_class(mapping, cls, _converter(), neighbours)
    except Invalid as invalid:
        raise ConfigError(*(f"{path}{where}{message}" for where, message in invalid.faults)) from None
    return instance


@functools.cache
def _converter() -> Converter:
    return strict_converter(_structure_class)


def _structure_class(mapping: Any, cls: type, converter: Converter, neighbours: Iterable[str] = ()) -> Any:
    if isinstance(mapping, cls):
        return mapping
    if not isinstance(mapping, Mapping):
        raise Invalid.expected(cls, mapping)
    attributes, hints = attributes_of(cls), hints_of(cls)
    faults: list[Fault] = []
    values: dict[str, Any] = {}
    lacking: set[str] = set()
    for key, attribute in attributes.items():
        doc = attribute.metadata.get("doc", "")
        if key in mapping:
            try:
                values[key] = converter.structure(mapping[key], hints[attribute.name])
                continue
            except Invalid as invalid:
                found = invalid.below(f".{key}")
            except (ValueError, TypeError):  # of a type that cattrs structures by itself, such as Path
                found = Invalid.expected(hints[attribute.name], mapping[key]).below(f".{key}")
            faults += [
                (where, f"{text} ({doc})" if doc and where == f".{key}" else text) for where, text in found
            ]
        elif attribute.default is attrs.NOTHING:
            faults.append((f".{key}", f" is required: {doc}" if doc else " is required"))
        else:
            continue
        lacking.add(key)
    faults += [_unknown(key, attributes, neighbours) for key in mapping if key not in attributes]
    faults += _validate(cls, attributes, values, lacking)
    if faults:
        raise Invalid(faults)
    try:
        return cls(**values)
    except (ValueError, TypeError) as error:
        raise Invalid(_told("", error)) from error


def _unknown(key: Any, known: Iterable[str], neighbours: Iterable[str]) -> tuple[str, str]:
    if not isinstance(key, str):
        return f"[{key!r}]", ": keys are strings"
    near = difflib.get_close_matches(key, [*known, *neighbours], n=1)
    remedy = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known) or 'none'}"
    return f".{key}", f" is not a known key; {remedy}"


def _validate(
    cls: type,
    attributes: Mapping[str, attrs.Attribute[Any]],
    values: Mapping[str, Any],
    lacking: AbstractSet[str],
) -> list[Fault]:
    """What the validators find in the values and defaults; ``lacking``: fields that have neither."""
    draft: Any = object.__new__(cls)
    faults: list[Fault] = []
    given: dict[str, Any] = {}
    for key, attribute in attributes.items():
        if key in lacking:
            continue
        try:
            value = values[key] if key in values else default_of(attribute, draft)
            given[key] = _converted(attribute, value, draft)
            object.__setattr__(draft, attribute.name, given[key])
        except (ValueError, TypeError) as error:
            faults += _told(f".{key}", error)
        except AttributeError:
            if not lacking:  # else it may come from a field whose own fault is told already
                raise
    for key, value in given.items():
        validator = attributes[key].validator
        if validator is None:
            continue
        try:
            validator(draft, attributes[key], value)
        except (ValueError, TypeError) as error:
            faults += _told(f".{key}", error)
        except AttributeError:
            if not lacking:  # else it may come from a field whose own fault is told already
                raise
    return faults


def _converted(attribute: attrs.Attribute[Any], value: Any, draft: Any) -> Any:
    converter: Any = attribute.converter
    if not isinstance(converter, attrs.Converter):
        return value if converter is None else converter(value)
    wrapped: Any = converter
    extra = [draft] * wrapped.takes_self + [attribute] * wrapped.takes_field
    return wrapped.converter(value, *extra)


def _told(where: str, error: Exception) -> list[Fault]:
    """What a validator said; attrs' own put the text first and more arguments after it."""
    said = error.faults if isinstance(error, ConfigError) else (str(error.args[0] if error.args else error),)
    return [(where, f" {text}" if text.startswith("must ") else f": {text}") for text in said]
