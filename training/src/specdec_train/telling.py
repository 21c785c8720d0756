"""Progress of a run, on standard error: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

#: Seconds between lines where there is no terminal.
_EVERY = 5.0


class _Told:
    """Implements :class:`~specdec_train.pipeline.Teller`."""

    def __init__(self, console: Console, progress: Progress | None) -> None:
        self._console, self._progress = console, progress
        self._task: Any = None
        self._name, self._began, self._last = "", time.perf_counter(), 0.0

    def stage(self, name: str, total: float | None = None) -> None:
        self._name, self._began, self._last = name, time.perf_counter(), 0.0
        if self._progress is None:
            self._console.print(f"{name} ...")
            return
        if self._task is not None:
            self._progress.stop_task(self._task)
        self._task = self._progress.add_task(name, total=total, detail="")

    def advance(self, done: float, detail: str) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done, detail=detail)
            return
        now = time.perf_counter()
        if now - self._last >= _EVERY or "accept" in detail:
            self._last = now
            self._console.print(f"{self._name} {now - self._began:.0f} s: {done:,.0f}, {detail}")


@contextlib.contextmanager
def telling() -> Iterator[_Told]:
    """Who tells how a run goes."""
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        yield _Told(console, None)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[detail]}"),
    )
    with Progress(*columns, console=console) as progress:
        yield _Told(console, progress)
