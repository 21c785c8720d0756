"""The adapters of an engine: checked at the door, kept on the host, and put into slots of the device."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import attrs
import torch

from ..contract import ConfigError
from ..layers.adapters import Factors, PackedAdapters, StackedAdapters, TokenAdapters
from ..layers.linear import Linear
from ..models import Decoder
from ..models.placing import checkpoint_modules
from .checkpoint import AdapterFiles, Target, check_adapter, find_adapter, stamp_of
from .request import LoRARequest
from .slots import Adapter, AdapterLost, AdapterSlots


@attrs.frozen(kw_only=True)
class LoRALimits:
    """How many adapters there is room for, and of what rank."""

    max_loras: int  #: on the device
    max_cpu_loras: int  #: on the host, those on the device included
    max_rank: int


class LoRAManager:
    """Gives the layers of a decoder their slots, and fills them.

    What an adapter is, is settled at the door by its files' headers; its weights are read when a request
    that wants it is admitted.
    """

    def __init__(self, decoder: Decoder, limits: LoRALimits, *, exact: bool) -> None:
        self.limits = limits
        self.slots = AdapterSlots(limits.max_loras, self._fill)
        self._dtype = decoder.dtype
        self._targets = _targets(decoder)
        self._layers = list({id(target.layer): target.layer for target in self._targets.values()}.values())
        tokens = decoder.adapters = TokenAdapters()
        for layer in self._layers:
            layer.adapters = _room(decoder, layer, limits, tokens, exact=exact)
        self._known: dict[int, Adapter] = {}  # by number
        self._host: OrderedDict[Adapter, dict[str, Factors]] = OrderedDict()  # the one used longest ago first
        self._door = threading.Lock()  # requests may come in by a thread of their own

    @property
    def num_bytes(self) -> int:
        """Bytes that the slots take on the device."""
        return sum(layer.adapters.num_bytes for layer in self._layers if layer.adapters is not None)

    @property
    def host_adapters(self) -> tuple[Adapter, ...]:
        """Those whose weights are kept on the host, the one used longest ago first."""
        return tuple(self._host)

    # -- at the door ------------------------------------------------------------------------------
    def adapter_of(self, request: Any, where: str = "lora_request") -> Adapter:
        """The adapter that ``request`` asks for, checked.

        Args:
            where: what messages call the request.

        Raises:
            ConfigError: it is no LoRARequest, its number is another adapter's, or its files cannot be served.
        """
        if not isinstance(request, LoRARequest):
            raise ConfigError(f"{where} must be a LoRARequest, got {request!r}")
        with self._door:
            known = self._known.get(request.lora_int_id)
            if known is not None:
                _check_same(known, request, where)
                return known
            folder = find_adapter(request.lora_path, f"{where}.lora_path")
            files = check_adapter(folder, self._targets, self.limits.max_rank)
            adapter = Adapter(request.lora_name, request.lora_int_id, files)
            self._known[request.lora_int_id] = adapter
            return adapter

    # -- in the engine's thread ---------------------------------------------------------------------
    def _fill(self, adapter: Adapter, slot: int) -> None:
        factors = self._on_host(adapter)
        by_layer: dict[int, dict[str, Factors]] = {}
        for module, pair in factors.items():
            target = self._targets[module]
            by_layer.setdefault(id(target.layer), {})[target.part] = target.share_of(*pair)
        with torch.inference_mode():
            for layer in self._layers:
                assert layer.adapters is not None
                layer.adapters.put(slot, by_layer.get(id(layer), {}))

    def _on_host(self, adapter: Adapter) -> dict[str, Factors]:
        files: AdapterFiles = adapter.files
        if adapter not in self._host:
            try:
                if stamp_of(files.folder) != files.stamp:
                    raise AdapterLost(
                        f"the files of adapter {adapter.name!r} in {files.folder} changed after it was first "
                        "asked for: give what they hold now a lora_int_id of its own"
                    )
                factors = files.read(self._dtype)
            except (OSError, ConfigError) as error:
                raise AdapterLost(f"adapter {adapter.name!r} cannot be loaded any more: {error}") from error
            while len(self._host) >= self.limits.max_cpu_loras:
                self._host.popitem(last=False)
            self._host[adapter] = factors
        self._host.move_to_end(adapter)
        return self._host[adapter]


def _check_same(known: Adapter, request: LoRARequest, where: str) -> None:
    """Raise ConfigError unless ``request`` means what its number has meant before."""
    files: AdapterFiles = known.files
    if known.name != request.lora_name or files.folder != find_adapter(
        request.lora_path, f"{where}.lora_path"
    ):
        raise ConfigError(
            f"{where}.lora_int_id={known.number} is adapter {known.name!r} of {files.folder}, got "
            f"{request.lora_name!r} of {request.lora_path}: give each adapter a number of its own"
        )
    if stamp_of(files.folder) != files.stamp:
        raise ConfigError(
            f"{where}: the files in {files.folder} changed since lora_int_id={known.number} was first asked "
            "for: give what they hold now a number of its own"
        )


def _targets(decoder: Decoder) -> dict[str, Target]:
    """The modules of the decoder's layers that may be adapted, by their names in checkpoints."""
    found: dict[str, Target] = {}
    for path, module in decoder.layers.named_modules(prefix="layers"):
        if isinstance(module, Linear):
            for source, part in checkpoint_modules(path):
                name = module.parts[0] if part is None else part
                found[f"model.{source}"] = Target(module, name)
    return found


def _room(
    decoder: Decoder, layer: Linear, limits: LoRALimits, tokens: TokenAdapters, *, exact: bool
) -> StackedAdapters | PackedAdapters:
    parts = {name: layer.part_size(name) for name in layer.parts}
    if decoder.device.type == "cpu" and not decoder.fused:
        return PackedAdapters(parts, slots=limits.max_loras, tokens=tokens, dtype=decoder.dtype, exact=exact)
    return StackedAdapters(
        layer.in_features,
        parts,
        slots=limits.max_loras,
        rank=limits.max_rank,
        tokens=tokens,
        dtype=decoder.dtype,
        device=decoder.device,
    )
