"""The result of a benchmark as rows, as one JSON object, and as a table."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import attrs

from .running import PLAIN, Comparison, Measurement

if TYPE_CHECKING:
    from rich.table import Table

#: Distributions whose versions decide a measurement.
DISTRIBUTIONS = ("specdec-core", "specdec-kernels", "torch", "transformers", "numpy")


@attrs.frozen(kw_only=True)
class Row:
    """One line of the report. Figures of acceptance are None where nothing was drafted."""

    task: str
    method: str
    batch_size: int
    tokens_per_s: float  #: generated tokens by wall-clock time, prompts included
    speedup: float  #: tokens_per_s by that of the plain row
    acceptance_length: float | None  #: tokens of a step that verified drafts, the bonus token counted
    tokens_per_target_step: float | None  #: tokens of a decode step, with drafts or without
    acceptance_per_position: tuple[float, ...] | None
    identical: bool  #: every run wrote the tokens of the first plain run


def rows_of(comparisons: Iterable[Comparison]) -> list[Row]:
    """Two rows a comparison: plain, then speculative."""
    rows = []
    for comparison in comparisons:
        rows.append(_row(comparison.plain, 1.0))
        rows.append(_row(comparison.speculative, comparison.speedup))
    return rows


def _row(measurement: Measurement, speedup: float) -> Row:
    counters = measurement.counters
    return Row(
        task=measurement.task,
        method=measurement.method,
        batch_size=measurement.batch_size,
        tokens_per_s=measurement.tokens_per_s,
        speedup=speedup,
        acceptance_length=counters.acceptance_length,
        tokens_per_target_step=counters.tokens_per_target_step,
        acceptance_per_position=counters.acceptance_per_position,
        identical=not measurement.mismatches,
    )


def overall(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """All tasks of each batch size as one, for a report on more than one task."""
    totals = []
    for size in dict.fromkeys(comparison.plain.batch_size for comparison in comparisons):
        group = [comparison for comparison in comparisons if comparison.plain.batch_size == size]
        if len(group) > 1:
            plain, speculative = _total([c.plain for c in group]), _total([c.speculative for c in group])
            totals.append(Comparison(plain=plain, speculative=speculative))
    return totals


def _total(measurements: Sequence[Measurement]) -> Measurement:
    first, *rest = measurements
    counters = first.counters
    for measurement in rest:
        counters += measurement.counters
    return attrs.evolve(
        first,
        task="all",
        seconds=sum(m.seconds for m in measurements),
        counters=counters,
        outputs=tuple(output for m in measurements for output in m.outputs),
        mismatches=tuple(mismatch for m in measurements for mismatch in m.mismatches),
    )


def as_json(environment: Mapping[str, Any], rows: Iterable[Row]) -> dict[str, Any]:
    """The object that ``specdecode bench --json`` prints."""
    return {"environment": dict(environment), "rows": [attrs.asdict(row) for row in rows]}


def environment_of(device: str, plugins: Mapping[str, str]) -> dict[str, Any]:
    """Where a measurement was made: versions (``plugins``: those of the method), machine, threads."""
    import torch

    name = torch.cuda.get_device_name(torch.device(device)) if device.startswith("cuda") else _cpu_name()
    return {
        "versions": {name: found for name in DISTRIBUTIONS if (found := _version(name))} | dict(plugins),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": device,
        "device_name": name,
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def table_of(comparisons: Sequence[Comparison], title: str) -> Table:
    """For a terminal: a line a row, and one over all tasks of each batch size."""
    from rich import box
    from rich.table import Table

    # Eighty columns hold drafts of five tokens; longer ones fold.
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for column in ("task", "method"):
        table.add_column(f"\n{column}", no_wrap=True)
    for column in ("\nbatch", "tokens/\nsecond", "\nspeedup", "accept\nlength", "tokens/\nstep"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("accepted at\neach place, %")
    table.add_column("\nidentical", justify="right", no_wrap=True)
    for rows in (rows_of(comparisons), rows_of(overall(comparisons))):
        for row in rows:
            table.add_row(*_cells(row), end_section=row.method != PLAIN)
    return table


def _cells(row: Row) -> list[str]:
    return [
        row.task,
        row.method,
        str(row.batch_size),
        f"{row.tokens_per_s:.1f}",
        f"{row.speedup:.2f}x",
        _figure(row.acceptance_length),
        _figure(row.tokens_per_target_step),
        " ".join(f"{100 * share:.0f}" for share in row.acceptance_per_position or ()) or "-",
        "yes" if row.identical else "NO",
    ]


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
