"""Changes to JSON schemas."""

from __future__ import annotations

from typing import Any

#: Keywords whose value maps names to schemas.
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
#: Keywords whose value is data, whatever it looks like.
_DATA = frozenset({"const", "enum", "default", "examples", "x-guidance"})


def close_objects(schema: Any) -> Any:
    """``schema`` with ``additionalProperties: false`` where objects name properties and it does not say."""
    if isinstance(schema, list):
        return [close_objects(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            closed[key] = {name: close_objects(part) for name, part in value.items()}
        else:
            closed[key] = value if key in _DATA else close_objects(value)
    if "properties" in closed or "patternProperties" in closed:
        closed.setdefault("additionalProperties", False)
    return closed
