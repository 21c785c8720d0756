"""LoRARequest: the adapter that a request is answered with, as in vLLM."""

from __future__ import annotations

import attrs

from ..contract import ConfigError


@attrs.frozen
class LoRARequest:
    """An adapter by its name, its number and where it lies.

    Args:
        lora_name: what metrics and a server call it.
        lora_int_id: 1 or more; tells adapters apart, so each has its own.
        lora_path: directory with PEFT's ``adapter_config.json`` and ``adapter_model.safetensors``, or the hub
            id of one in the offline cache.

    Raises:
        ConfigError: a field has no such value.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __attrs_post_init__(self) -> None:
        faults = []
        for field in ("lora_name", "lora_path"):
            value = getattr(self, field)
            if not isinstance(value, str) or not value or not value.isprintable():
                faults.append(f"{field} must be a printable string that is not empty, got {value!r}")
        number = self.lora_int_id
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            faults.append(f"lora_int_id must be an integer of at least 1, got {number!r}")
        if faults:
            raise ConfigError(*faults)


__all__ = ["LoRARequest"]
