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

    from .profiling import StepProfile

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
    decode_speedup: float | None  #: the same of the time between tokens, so that prompts do not count
    acceptance_length: float | None  #: tokens of a step that verified drafts, the bonus token counted
    tokens_per_target_step: float | None  #: tokens of a decode step, with drafts or without
    acceptance_per_position: tuple[float, ...] | None
    identical: bool  #: every run wrote the tokens of the first plain run
    synthetic: bool  #: drafts were accepted by rate, whatever their tokens
    lossy: str | None  #: the rule of verification, if the output has not the model's law
    acceptance_rate: float | None  #: share of the draft tokens that were accepted
    drafts_per_target_step: float | None  #: gamma: draft tokens of a decode step, with drafts or without
    cost_ratio: float | None  #: c: time of one draft token by that of a plain step
    memory_bound_speedup: float | None  #: tokens_per_target_step / (cost_ratio * drafts_per_target_step + 1)
    efficiency: float | None  #: speedup / tokens_per_target_step
    draft_overhead: float | None  #: propose_seconds / target_seconds
    seconds: float  #: of all runs; the four below add up to it
    target_seconds: float
    verify_seconds: float
    propose_seconds: float
    other_seconds: float


def rows_of(comparisons: Iterable[Comparison]) -> list[Row]:
    """Two rows a comparison: plain, then speculative."""
    rows = []
    for comparison in comparisons:
        rows.append(_row(comparison.plain))
        rows.append(_row(comparison.speculative, comparison))
    return rows


def _row(measurement: Measurement, beside: Comparison | None = None) -> Row:
    """``beside``: the comparison that a speculative measurement is part of."""
    counters = measurement.counters
    return Row(
        task=measurement.task,
        method=measurement.method,
        batch_size=measurement.batch_size,
        tokens_per_s=measurement.tokens_per_s,
        speedup=beside.speedup if beside else 1.0,
        decode_speedup=beside.decode_speedup if beside else None,
        acceptance_length=counters.acceptance_length,
        tokens_per_target_step=counters.tokens_per_target_step,
        acceptance_per_position=counters.acceptance_per_position,
        identical=not measurement.mismatches,
        synthetic=counters.synthetic,
        lossy=counters.lossy,
        acceptance_rate=counters.acceptance_rate,
        drafts_per_target_step=counters.drafts_per_target_step,
        cost_ratio=beside.cost_ratio if beside else None,
        memory_bound_speedup=beside.memory_bound_speedup if beside else None,
        efficiency=beside.efficiency if beside else None,
        draft_overhead=counters.draft_overhead,
        seconds=measurement.seconds,
        target_seconds=counters.target_seconds,
        verify_seconds=counters.verify_seconds,
        propose_seconds=counters.propose_seconds,
        other_seconds=measurement.other_seconds,
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


def advice_on(comparisons: Sequence[Comparison]) -> str | None:
    """One line on all that was measured: on the batch size with the smallest speedup first."""
    totals = overall(comparisons) or list(comparisons)
    found = (total.advice() for total in sorted(totals, key=lambda total: total.speedup))
    return next((advice.line for advice in found if advice), None)


def as_json(
    environment: Mapping[str, Any],
    rows: Iterable[Row],
    advice: str | None = None,
    profiles: Iterable[StepProfile] | None = None,
) -> dict[str, Any]:
    """The object that ``specdecode bench --json`` prints; with ``--profile`` it has ``profile`` as well."""
    result = {
        "environment": dict(environment),
        "rows": [attrs.asdict(row) for row in rows],
        "advice": advice,
    }
    if profiles is not None:
        result["profile"] = [attrs.asdict(profile) for profile in profiles]
    return result


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
        f"{row.method}, {row.lossy}" if row.lossy else row.method,
        str(row.batch_size),
        f"{row.tokens_per_s:.1f}",
        f"{row.speedup:.2f}x",
        _figure(row.acceptance_length),
        _figure(row.tokens_per_target_step),
        " ".join(f"{100 * share:.0f}" for share in row.acceptance_per_position or ()) or "-",
        "yes" if row.identical else "NO",
    ]


def cost_table_of(comparisons: Sequence[Comparison], title: str) -> Table:
    """For a terminal, a line for each speculative row: what drafting cost, and where the time went."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("\ntask", no_wrap=True)
    for column in (
        "\nbatch", "decode\nspeedup", "accept\nrate", "drafts\na step", "cost\nratio",
        "memory\nbound", "effi-\nciency", "draft/\ntarget", "tar-\nget", "ver-\nify", "pro-\npose",
    ):  # fmt: skip
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows_of([*comparisons, *overall(comparisons)]):
        if row.method != PLAIN:
            table.add_row(*_cost_cells(row))
    return table


def _cost_cells(row: Row) -> list[str]:
    times = (row.target_seconds, row.verify_seconds, row.propose_seconds)
    return [
        f"{row.task}, {row.lossy}" if row.lossy else row.task,
        str(row.batch_size),
        "-" if row.decode_speedup is None else f"{row.decode_speedup:.2f}x",
        _share(row.acceptance_rate),
        _figure(row.drafts_per_target_step),
        "-" if row.cost_ratio is None else f"{row.cost_ratio:.4f}",
        "-" if row.memory_bound_speedup is None else f"{row.memory_bound_speedup:.2f}x",
        _figure(row.efficiency),
        _share(row.draft_overhead),
        *(_share(seconds / row.seconds) for seconds in times),
    ]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
