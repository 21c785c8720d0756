"""What a launched computation took where it ran."""

from __future__ import annotations

import time

import torch


class Span:
    """From its making to :meth:`end`: on a CUDA device the current stream's time, else the host's.

    Attributes:
        launching: seconds of the host, once it has ended.
        done: when the device has come to the end; None without a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self.launching = 0.0
        self.done: torch.cuda.Event | None = None
        self._begun: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._begun = torch.cuda.Event(enable_timing=True)
            self._begun.record()
        self._started = time.perf_counter()

    def end(self) -> None:
        self.launching = time.perf_counter() - self._started
        if self._begun is not None:
            self.done = torch.cuda.Event(enable_timing=True)
            self.done.record()

    def seconds(self) -> float | None:
        """What it took; None while the device is about it."""
        if self._begun is None or self.done is None:
            return self.launching
        return self._begun.elapsed_time(self.done) / 1e3 if self.done.query() else None
