"""Changes to JSON schemas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specdecode.contract import ConfigError

from .params import FIELD, TOO_DEEP

#: Keywords whose value maps names to schemas.
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
#: Keywords whose value is data, whatever it looks like.
_DATA = frozenset({"const", "enum", "default", "examples", "x-guidance"})


#: Keywords that are for people: nothing of an output depends on their texts.
_REMARKS = frozenset({"title", "description", "$comment"})


def close_objects(schema: Any) -> Any:
    """``schema`` with ``additionalProperties: false`` where objects name properties and it does not say."""
    return _changed(schema, _closed)


def without_remarks(schema: Any) -> Any:
    """``schema`` without titles and descriptions, which make half of many.

    Raises:
        ConfigError: it is nested too deeply.
    """
    try:
        return _changed(schema, _plain)
    except RecursionError:
        raise ConfigError(f"{FIELD}.json {TOO_DEEP}") from None


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    objects = "properties" in schema or "patternProperties" in schema
    return {"additionalProperties": False, **schema} if objects else schema


def _plain(schema: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key not in _REMARKS or not isinstance(value, str)}


def _changed(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """``change`` of every schema within ``schema``, innermost first."""
    if isinstance(schema, list):
        return [_changed(part, change) for part in schema]
    if not isinstance(schema, dict):
        return schema
    changed: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            changed[key] = {name: _changed(part, change) for name, part in value.items()}
        else:
            changed[key] = value if key in _DATA else _changed(value, change)
    return change(changed)
