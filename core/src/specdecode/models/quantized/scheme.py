"""What a checkpoint's ``quantization_config`` says: which layout its modules are stored in."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol, TypeAlias

import attrs
import torch
from specdec_kernels.quantized import Kind, QuantizedMatrix

from specdecode.contract import ConfigError

#: A module's tensors by the last part of their names.
Tensors: TypeAlias = Mapping[str, torch.Tensor]


class Layout(Protocol):
    """How one module's weight is stored. One class a publisher's format."""

    @property
    def kind(self) -> Kind: ...

    @property
    def key(self) -> str:
        """The tensor that a module stored so has, and no other."""

    @property
    def others(self) -> tuple[str, ...]:
        """Further tensors of such a module that are read, if they are there."""

    def matrix(self, stored: Tensors, outputs: int, inputs: int) -> QuantizedMatrix:
        """The weight ``[outputs, inputs]``; ValueError where the tensors do not fit."""

    def groups(self, inputs: int) -> int:
        """Scales of a row, for random weights."""


@attrs.frozen(kw_only=True)
class Target:
    """Modules of one layout."""

    layout: Layout
    patterns: tuple[str, ...] = ("Linear",)

    def matches(self, module: str) -> bool:
        return "Linear" in self.patterns or any(_matches(pattern, module) for pattern in self.patterns)


@attrs.frozen(kw_only=True)
class Scheme:
    """The layouts of a checkpoint. Which modules are stored in them, the names of its tensors tell."""

    method: str
    targets: tuple[Target, ...]
    ignored: tuple[str, ...] = ()  #: modules that stay as they are; counts where there are no tensors

    #: Of tensors beside weights that are read by nobody: scales of activations and of the KV cache.
    UNUSED: ClassVar[re.Pattern[str]] = re.compile(
        r"\.(input_scale|output_scale|input_zero_point|weight_shape|[kvq]_scale|k_proj\.k_scale|v_proj\.v_scale)$"
    )

    def layout_of(self, module: str, *, ignoring: bool = False) -> Layout | None:
        """The layout of a module of the checkpoint; ``ignoring`` those that are to stay as they are."""
        if ignoring and any(_matches(pattern, module) for pattern in self.ignored):
            return None
        return next((target.layout for target in self.targets if target.matches(module)), None)


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return (
            re.match(pattern[3:], module) is not None or re.match(pattern[3:], f"model.{module}") is not None
        )
    names = module.removeprefix("model."), pattern.removeprefix("model.")
    return names[0] == names[1] or f".{names[1]}." in f".{names[0]}."


def read_scheme(hf_config: Any, name: str) -> Scheme | None:
    """The scheme of a model's config; None if it is not quantised.

    Raises:
        ConfigError: the scheme is none that can be read; names it and what works.
    """
    stored = _stored(hf_config)
    return None if stored is None else scheme_of(stored, name)


def quantization_to_make(wanted: str | None, hf_config: Any, name: str) -> str | None:
    """What is left to do of the keyword ``quantization``: nothing where it says how the checkpoint is stored.

    Raises:
        ConfigError: the checkpoint is stored in another way.
    """
    if wanted not in _readers():
        return wanted
    stored = _stored(hf_config)
    if stored is None or _method(stored) != wanted:
        is_what = "not quantized" if stored is None else f"quantized by {stored.get('quant_method')!r}"
        raise ConfigError(
            f"quantization={wanted!r} says how a checkpoint is stored, and model {name!r} is {is_what}: "
            "leave quantization out, or give a checkpoint that is stored so"
        )
    return None


def _stored(hf_config: Any) -> Mapping[str, Any] | None:
    """The ``quantization_config`` of a model's config; None if there is none."""
    stored = getattr(hf_config, "quantization_config", None)
    if not stored:
        return None
    return stored if isinstance(stored, Mapping) else stored.to_dict()


def _method(config: Mapping[str, Any]) -> str:
    return str(config.get("quant_method", "")).lower().replace("_", "-")


def scheme_of(config: Mapping[str, Any], name: str) -> Scheme:
    """The scheme of a ``quantization_config``; raises as :func:`read_scheme`."""
    method = _method(config)
    reader = _readers().get(method)
    if reader is None:
        raise ConfigError(
            f"model {name!r} is quantized by {config.get('quant_method')!r}, which is not supported: use a "
            f"checkpoint in one of {', '.join(sorted(_readers()))}, or an unquantized one"
        )
    try:
        return reader(config)
    except ValueError as error:
        raise ConfigError(
            f"model {name!r} is quantized by {method} in a way that is not supported: {error}; use another "
            "quantized checkpoint of it, or an unquantized one"
        ) from error


def _readers() -> dict[str, Callable[[Mapping[str, Any]], Scheme]]:
    from . import awq, compressed, fp8, gptq

    return {
        "awq": awq.read,
        "compressed-tensors": compressed.read,
        "fp8": fp8.read,
        "gptq": gptq.read,
    }


def only(config: Mapping[str, Any], field: str, *allowed: Any, default: Any = None) -> Any:
    """The value of ``field``; ValueError unless it is one of ``allowed``."""
    value = config.get(field, default)
    value = default if value is None else value
    if value not in allowed:
        raise ValueError(f"{field} is {value!r}, and can be {' or '.join(map(repr, allowed))}")
    return value


def names(config: Mapping[str, Any], field: str) -> tuple[str, ...]:
    """A list of modules, which may be missing."""
    return tuple(map(str, config.get(field) or ()))
