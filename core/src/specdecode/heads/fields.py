"""Fields that the ``config.json`` of heads has in common, read and judged. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..contract import ConfigError, Unsupported

#: Values of ``hidden_act`` that the native decoder's layers compute.
ACTIVATIONS = ("silu", "swish", "gelu_pytorch_tanh")
#: What transformers' rope functions know.
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")


def positive(fields: Mapping[str, Any], key: str, where: str) -> int | None:
    """``fields[key]``, None if it is not there; ConfigError if it is no positive integer.

    Args:
        where: what messages call the checkpoint.
    """
    value = fields.get(key)
    if value is None:
        return None
    if type(value) is not int or value < 1:
        raise ConfigError(f"{where}: {key} of config.json must be a positive integer, got {value!r}")
    return value


def activation(layer: Mapping[str, Any], where: str) -> str:
    """``hidden_act``, silu if it is not said; Unsupported if layers do not compute it."""
    act: str = layer.get("hidden_act", "silu")
    if act not in ACTIVATIONS:
        raise Unsupported(f"{where}: hidden_act {act!r} is not supported; {', '.join(ACTIVATIONS)} are")
    return act


def rope_parameters(layer: Mapping[str, Any], where: str) -> dict[str, Any]:
    """In the spelling of transformers 5, from it or the older one; where no theta is named it is 10000.

    Raises:
        Unsupported: an unknown type.
    """
    merged = {**(layer.get("rope_scaling") or {}), **(layer.get("rope_parameters") or {})}
    merged["rope_type"] = merged.get("rope_type") or merged.pop("type", None) or "default"
    merged["rope_theta"] = float(merged.get("rope_theta") or layer.get("rope_theta") or 10000.0)
    if merged["rope_type"] not in ROPE_TYPES:
        known = ", ".join(ROPE_TYPES)
        raise Unsupported(f"{where}: rope_type {merged['rope_type']!r} is not supported; {known} are")
    return merged


def proposed_tokens(top: Mapping[str, Any]) -> int | None:
    """``speculative_tokens`` of the first method that a config of the speculators format proposes."""
    methods = (top.get("speculators_config") or {}).get("proposal_methods") or [{}]
    value = methods[0].get("speculative_tokens") if isinstance(methods[0], Mapping) else None
    return value if type(value) is int and value > 0 else None
