"""Which adapters are on the device: a fixed number of slots, some held by running requests. No torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import attrs

from ..contract import SpecdecodeError


class AdapterLost(SpecdecodeError):
    """An adapter's files cannot be read any more, or are no longer what they were."""


@attrs.define(eq=False)
class Adapter:
    """An adapter that requests refer to; one object for each."""

    name: str
    number: int  #: its ``lora_int_id``
    files: Any  #: what it is loaded from
    slot: int | None = None  #: where it is on the device; None: nowhere
    holders: int = 0  #: running requests that use it

    @property
    def namespace(self) -> str:
        """Keeps its KV apart from that of others in the prefix cache; no ``cache_salt`` can look like it."""
        return f"\0lora:{self.number}"


class AdapterSlots:
    """``num_slots`` adapters at most are on the device; the one that was used longest ago gives way first.

    Args:
        load: puts an adapter into a slot; raises :class:`AdapterLost` if it cannot.
    """

    def __init__(self, num_slots: int, load: Callable[[Adapter, int], None]) -> None:
        self.num_slots = num_slots
        self.num_loads = 0
        self._load = load
        self._resident: OrderedDict[Adapter, None] = OrderedDict()  # the one used longest ago first
        self._free = list(range(num_slots))

    @property
    def resident(self) -> tuple[Adapter, ...]:
        """The adapters that are on the device, the one used longest ago first."""
        return tuple(self._resident)

    def may_hold(self, adapter: Adapter) -> bool:
        """Whether it has a slot, or one is free or held by nobody."""
        return adapter.slot is not None or bool(self._free) or self._idle() is not None

    def hold(self, adapter: Adapter) -> None:
        """Keep it on the device for one more request; where it is not there yet it is loaded.

        Raises:
            AdapterLost: it cannot be loaded; nobody holds it.
        """
        if adapter.slot is None:
            self._settle(adapter)
        self._resident.move_to_end(adapter)
        adapter.holders += 1

    def release(self, adapter: Adapter) -> None:
        """One request less uses it; it stays until its slot is wanted."""
        assert adapter.holders > 0, f"nobody holds adapter {adapter.name!r}"
        adapter.holders -= 1

    def _settle(self, adapter: Adapter) -> None:
        if not self._free:
            idle = self._idle()
            assert idle is not None and idle.slot is not None, "all slots are held: ask `may_hold` before"
            del self._resident[idle]
            self._free.append(idle.slot)
            idle.slot = None
        self._load(adapter, self._free[-1])
        self.num_loads += 1
        adapter.slot = self._free.pop()
        self._resident[adapter] = None

    def _idle(self) -> Adapter | None:
        return next((adapter for adapter in self._resident if not adapter.holders), None)
