"""PEFT's ``adapter_config.json``: which modules are adapted, by how much, and what of it is not served."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from ..contract import ConfigError

CONFIG = "adapter_config.json"

#: Ways to begin that also change the weights of the base model, so that the adapter does not fit the model's.
_OTHER_BASE = ("pissa", "olora", "corda", "loftq")


@attrs.frozen(kw_only=True)
class LoRAConfig:
    """The part of the file that says what is computed."""

    rank: int
    alpha: float
    rank_stabilized: bool  #: scaled by ``alpha / sqrt(rank)`` (arXiv 2312.03732), not ``alpha / rank``
    target_modules: Sequence[str] | str  #: ends of module names, or a regular expression of whole names
    exclude_modules: Sequence[str] | str = ()
    layers: Collection[int] | None = None  #: of which layers; None: of all
    rank_pattern: Mapping[str, int] = attrs.field(factory=dict)
    alpha_pattern: Mapping[str, float] = attrs.field(factory=dict)

    def selects(self, module: str) -> bool:
        """Whether ``module``, named as in the base model, is adapted."""
        if self.layers is not None:
            found = re.search(r"\.layers\.(\d+)\.", module)
            if found is None or int(found[1]) not in self.layers:
                return False
        return _named(module, self.target_modules) and not _named(module, self.exclude_modules)

    def rank_of(self, module: str) -> int:
        return _of_pattern(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """What ``B (A x)`` is multiplied by."""
        rank, alpha = self.rank_of(module), _of_pattern(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.rank_stabilized else rank)


def _named(module: str, names: Sequence[str] | str) -> bool:
    if names == "all-linear":
        return True
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _of_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first pattern that the end of the name matches, as PEFT looks them up."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def read_config(folder: Path) -> LoRAConfig:
    """Read and check an adapter's config.

    Raises:
        ConfigError: it cannot be read, or asks for what is not served: everything of it.
    """
    file = folder / CONFIG
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{file} must hold a JSON object, got {type(fields).__name__}")
    if faults := [f"{file}: {fault}" for fault in (*_refused(fields), *_malformed(fields))]:
        raise ConfigError(*faults)
    layers = fields.get("layers_to_transform")
    return LoRAConfig(
        rank=fields["r"],
        alpha=fields.get("lora_alpha", 8),
        rank_stabilized=bool(fields.get("use_rslora")),
        target_modules=fields["target_modules"],
        exclude_modules=fields.get("exclude_modules") or (),
        layers=None if layers is None else {layers} if isinstance(layers, int) else set(layers),
        rank_pattern=fields.get("rank_pattern") or {},
        alpha_pattern=fields.get("alpha_pattern") or {},
    )


def _refused(fields: Mapping[str, Any]) -> list[str]:
    """What of a file is not served, each by its name."""
    remedy = "merge it into a checkpoint of its own (merge_and_unload), or train it without"
    faults = []
    if (kind := fields.get("peft_type")) != "LORA":
        faults.append(f"peft_type must be 'LORA', got {kind!r}: no other adapters are served")
    if fields.get("use_dora"):
        faults.append(f"use_dora (DoRA) is not served: {remedy}")
    if modules := fields.get("modules_to_save"):
        faults.append(
            f"modules_to_save={modules!r} (whole modules trained beside it) is not served: {remedy}"
        )
    if (bias := fields.get("bias", "none")) != "none":
        faults.append(f"bias={bias!r} (trained biases) is not served, only 'none': {remedy}")
    for name, what in (
        ("lora_bias", "a bias of B"),
        ("layer_replication", "layers that are stacked again"),
        ("trainable_token_indices", "trained embeddings"),
        ("target_parameters", "adapted parameters that are no module's"),
        ("alora_invocation_tokens", "aLoRA: on from some tokens on"),
        ("use_qalora", "QALoRA: inputs are pooled"),
        ("megatron_config", "a Megatron model"),
    ):
        if fields.get(name):
            faults.append(f"{name}={fields[name]!r} ({what}) is not served: {remedy}")
    begun = fields.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_OTHER_BASE):
        faults.append(
            f"init_lora_weights={begun!r} changed the base model's weights too, which the adapter has not: "
            "save it with path_initial_model_for_weight_conversion, which makes a plain LoRA of it"
        )
    return faults


def _malformed(fields: Mapping[str, Any]) -> list[str]:
    """What is of the wrong kind."""

    def positive(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value > 0

    def number(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool)

    def names(value: Any) -> bool:
        if isinstance(value, str):
            return _is_expression(value)
        return isinstance(value, list) and all(isinstance(name, str) for name in value)

    def table(of: Callable[[Any], bool]) -> Callable[[Any], bool]:
        return lambda value: (
            isinstance(value, dict) and all(_is_expression(key) and of(own) for key, own in value.items())
        )

    def layers(value: Any) -> bool:
        return isinstance(value, int) or (isinstance(value, list) and all(isinstance(i, int) for i in value))

    checks: tuple[tuple[str, bool, Callable[[Any], bool], str], ...] = (
        ("r", True, positive, "an integer above 0"),
        ("lora_alpha", False, number, "a number"),
        ("target_modules", True, lambda value: bool(value) and names(value), "names or a regular expression"),
        ("exclude_modules", False, names, "names or a regular expression"),
        ("layers_to_transform", False, layers, "an integer or a list of them"),
        ("rank_pattern", False, table(positive), "regular expressions with integers above 0"),
        ("alpha_pattern", False, table(number), "regular expressions with numbers"),
    )
    faults = []
    for name, needed, right, what in checks:
        value = fields.get(name)
        if (needed or value is not None) and not right(value):
            faults.append(f"{name} must be {what}, got {value!r}")
    return faults


def _is_expression(text: Any) -> bool:
    try:
        re.compile(text)
    except (re.error, TypeError):
        return False
    return True
