"""What a server did under load: percentiles, goodput, a table and a plot."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from specdecode.contract import ConfigError

from .load import Run, Timing

if TYPE_CHECKING:
    from rich.table import Table

PERCENTILES = (50, 95, 99)


@attrs.frozen(kw_only=True)
class Objectives:
    """What a good answer keeps to, in milliseconds; None: anything."""

    ttft_ms: float | None = None
    inter_token_ms: float | None = None
    end_to_end_ms: float | None = None

    def met_by(self, timing: Timing) -> bool:
        """Whether a request was answered, and in time."""
        limits = (
            (self.ttft_ms, timing.ttft),
            (self.inter_token_ms, timing.inter_token),
            (self.end_to_end_ms, timing.end_to_end),
        )
        in_time = all(limit is None or value is None or 1000 * value <= limit for limit, value in limits)
        return timing.error is None and in_time


@attrs.frozen(kw_only=True)
class Row:
    """One side at one rate. Percentiles are milliseconds, by ``p50``, ``p95``, ``p99``; None: no reading."""

    side: str
    rate: float | None  #: requests a second; None: all at once
    requests: int
    failed: int
    seconds: float
    requests_per_s: float  #: answered
    output_tokens_per_s: float
    ttft_ms: dict[str, float] | None
    inter_token_ms: dict[str, float] | None  #: of the requests' means
    gap_ms: dict[str, float] | None  #: between pieces of text, each of one token or more
    end_to_end_ms: dict[str, float] | None
    goodput: float  #: requests a second that were answered and kept to the objectives
    acceptance_length: float | None  #: None: nothing was drafted, or the server does not tell
    errors: tuple[str, ...] = ()  #: what went wrong, a few of them


def row_of(run: Run, objectives: Objectives) -> Row:
    """Sum up a run."""
    good = [timing for timing in run.timings if timing.error is None]
    steps = sum(timing.draft_steps for timing in good)
    gained = sum(timing.gained for timing in good)
    errors = list(dict.fromkeys(timing.error for timing in run.timings if timing.error is not None))
    return Row(
        side=run.side,
        rate=None if math.isinf(run.rate) else run.rate,
        requests=len(run.timings),
        failed=len(run.timings) - len(good),
        seconds=run.seconds,
        requests_per_s=len(good) / run.seconds,
        output_tokens_per_s=sum(timing.tokens for timing in good) / run.seconds,
        ttft_ms=percentiles(timing.ttft for timing in good),
        inter_token_ms=percentiles(timing.inter_token for timing in good),
        gap_ms=percentiles(gap for timing in good for gap in timing.gaps),
        end_to_end_ms=percentiles(timing.end_to_end for timing in good),
        goodput=sum(map(objectives.met_by, run.timings)) / run.seconds,
        acceptance_length=gained / steps if steps else None,
        errors=tuple(errors[:5]),
    )


def percentiles(seconds: Iterable[float | None]) -> dict[str, float] | None:
    """P50, P95 and P99 in milliseconds, interpolated between readings; None without any."""
    readings = sorted(value for value in seconds if value is not None)
    if not readings:
        return None
    found = {}
    for percent in PERCENTILES:
        place = (len(readings) - 1) * percent / 100
        low = readings[math.floor(place)]
        found[f"p{percent}"] = 1000 * (low + (readings[math.ceil(place)] - low) * (place % 1))
    return found


def table_of(rows: Sequence[Row], title: str) -> Table:
    """For a terminal, a line a side and rate; times are P50/P95/P99 in ms."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("\nside", no_wrap=True)
    for column in (
        "rate/\nsecond", "\nfailed", "tokens/\nsecond", "TTFT\nms", "inter-\ntoken ms", "end to\nend ms",
        "good/\nsecond", "accept\nlength",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for place, row in enumerate(rows):
        last = place + 1 == len(rows) or rows[place + 1].rate != row.rate
        table.add_row(*_cells(row), end_section=last)
    return table


def _cells(row: Row) -> list[str]:
    return [
        row.side,
        "at once" if row.rate is None else f"{row.rate:g}",
        f"{row.failed}/{row.requests}",
        f"{row.output_tokens_per_s:.1f}",
        *(_three(times) for times in (row.ttft_ms, row.inter_token_ms, row.end_to_end_ms)),
        f"{row.goodput:.2f}",
        "-" if row.acceptance_length is None else f"{row.acceptance_length:.2f}",
    ]


def _three(times: Mapping[str, float] | None) -> str:
    if times is None:
        return "-"
    return "/".join(f"{value:.0f}" if value >= 10 else f"{value:.1f}" for value in times.values())


def as_json(environment: Mapping[str, Any], rows: Iterable[Row]) -> dict[str, Any]:
    """The object that ``specdecode bench serve --json`` prints."""
    return {"environment": dict(environment), "rows": [attrs.asdict(row) for row in rows]}


def check_plot(path: Path) -> None:
    """Raise before the work where the plot could not be drawn after it.

    Raises:
        ConfigError: matplotlib is missing, or there is no such folder.
    """
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise ConfigError("--plot wants matplotlib: pip install 'specdec-core[plot]'")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot: there is no folder {path.parent} to write {path.name} in; make it first")


def plot(rows: Sequence[Row], path: Path, title: str) -> None:
    """Latencies (P50 as a line, P95 dashed) and throughput over the rate, a colour a side."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(10, 7), layout="constrained")
    panels = (
        ("TTFT, ms", lambda row: row.ttft_ms),
        ("inter-token, ms", lambda row: row.inter_token_ms),
        ("end to end, ms", lambda row: row.end_to_end_ms),
    )
    for side in dict.fromkeys(row.side for row in rows):
        mine = [row for row in rows if row.side == side]
        places = range(len(mine))
        for axis, (label, read) in zip(axes.flat, panels, strict=False):
            times = [read(row) or {} for row in mine]
            (line,) = axis.plot(places, [t.get("p50", math.nan) for t in times], marker="o", label=side)
            tail = [t.get("p95", math.nan) for t in times]
            axis.plot(places, tail, linestyle="--", color=line.get_color(), label="_p95")
            axis.set_ylabel(label)
        axes.flat[3].plot(places, [row.output_tokens_per_s for row in mine], marker="o", label=side)
        axes.flat[3].set_ylabel("output tokens a second")
        names = ["at once" if row.rate is None else f"{row.rate:g}" for row in mine]
        for axis in axes.flat:
            axis.set_xticks(list(places), names)
            axis.set_xlabel("requests a second")
    for axis in axes.flat:  # when all sides are drawn: the top stays where it is from then on
        axis.set_ylim(bottom=0)
    axes.flat[0].legend(title="line P50, dashed P95")
    figure.suptitle(title)
    figure.savefig(path)
    pyplot.close(figure)
