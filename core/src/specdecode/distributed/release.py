"""Frees who waits, on a GPU, for a rank that has ended."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from .group import CollectiveGroup

#: Seconds in which somebody who is asking for a collective has done so.
_ASKING = 0.05


class Release(Protocol):
    """What becomes of collectives that wait for a rank which never comes."""

    def call_off(self) -> None:
        """Have those under way return, with any result; may block until no graph holds them any more."""

    def stop(self) -> None:
        """The last resort: end all that this process computes on its GPU, for good."""

    def free(self) -> None:
        """Give back what the collectives hold; may block like :meth:`call_off`."""


class NoRelease:
    """gloo notices by itself: the connection ends."""

    def call_off(self) -> None:
        return None

    stop = free = call_off


class DeviceRelease:
    """Of kernels that spin on a GPU.

    Args:
        group: its memory's kernels, if it has any, look for a word of this rank's beside the others'.
        backend: the group's ``torch.distributed.ProcessGroupNCCL``, whose kernels, replayed ones too, look
            for an abort.
    """

    def __init__(self, group: CollectiveGroup, backend: Any, device: torch.device) -> None:
        self._group = group
        self._backend = backend
        self._device = device
        self._peers = group.peers
        self._called_off = False
        self._stream = torch.cuda.Stream(device)
        with torch.cuda.stream(self._stream):
            self._false = torch.zeros(1, device=device)
            torch._assert_async(self._false + 1)  # loads the kernel: while another spins that might wait
        self._stream.synchronize()

    def call_off(self) -> None:
        # An abort holds the backend until all graphs are gone, and whoever asks it for more: nobody may.
        self._group.broken = True
        time.sleep(_ASKING)
        if self._peers is not None:
            self._peers.call_off()
        self._called_off = True
        self._backend.abort()

    def stop(self) -> None:
        """A failed assertion on the device ends its context, spinning kernels too; what waits then raises."""
        if self._peers is not None:
            self._peers.leak()
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            torch._assert_async(self._false)

    def free(self) -> None:
        if not self._called_off:
            self._backend.abort()
        if self._peers is not None:
            self._peers.close()
