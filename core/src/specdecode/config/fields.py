"""The fields of a configuration class, as users see them: names, types in words, defaults, documentation."""

from __future__ import annotations

import enum
import functools
import inspect
import types
from collections.abc import Collection, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import attrs

_WORDS: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    str: "a string",
    bool: "true or false",
    type(None): "None",
}


@attrs.frozen(kw_only=True)
class ConfigField:
    """One key of a configuration class."""

    name: str
    type: str  #: as it would be written in Python
    required: bool
    default: Any  #: None if ``required``, or if it derives from other fields
    doc: str


def fields_of(cls: type) -> tuple[ConfigField, ...]:
    """The keys that ``cls``, an attrs class, takes, in the order of their declaration."""
    return tuple(
        ConfigField(
            name=key,
            type=type_name(hints_of(cls)[attribute.name]),
            required=attribute.default is attrs.NOTHING,
            default=_fixed_default(attribute),
            doc=attribute.metadata.get("doc", ""),
        )
        for key, attribute in attributes_of(cls).items()
    )


def _fixed_default(attribute: attrs.Attribute[Any]) -> Any:
    derived = getattr(attribute.default, "takes_self", False)  # from other fields: known only with them
    return None if attribute.default is attrs.NOTHING or derived else default_of(attribute, None)


def attributes_of(cls: type) -> dict[str, attrs.Attribute[Any]]:
    """Key -> attribute, for what the constructor of ``cls`` takes."""
    return {attribute.alias or attribute.name: attribute for attribute in attrs.fields(cls) if attribute.init}


@functools.cache
def hints_of(cls: type) -> dict[str, Any]:
    """Attribute name -> type; annotations that are strings are resolved where they were written."""
    return get_type_hints(cls)


def type_name(hint: Any) -> str:
    """``hint`` as it would be written in Python: ``int | None``, ``Literal['a', 'b']``."""
    return inspect.formatannotation(hint).replace("typing.", "").replace("collections.abc.", "")


def describe(hint: Any) -> str:
    """``hint`` in words, to follow "must be"."""
    if hint in _WORDS:
        return _WORDS[hint]
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return _one_of(args)
    if is_union(hint):
        return " or ".join(describe(arg) for arg in args)
    base = origin or hint
    if isinstance(base, type):
        if issubclass(base, enum.Enum):
            return _one_of(member.value for member in base)
        if attrs.has(base) or issubclass(base, Mapping):
            return "a mapping"
        if issubclass(base, Collection):
            return "a list"
    return type_name(hint)


def is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def _one_of(values: Any) -> str:
    shown = [repr(value) for value in values]
    return shown[0] if len(shown) == 1 else f"one of {', '.join(shown)}"


def default_of(attribute: attrs.Attribute[Any], instance: Any) -> Any:
    """The default of ``attribute`` for ``instance``, whose earlier fields are set; there must be one."""
    default: Any = attribute.default
    if isinstance(default, attrs.Factory):  # type: ignore[arg-type]  # a class at run time, a function in the stubs
        return default.factory(instance) if default.takes_self else default.factory()
    return default
