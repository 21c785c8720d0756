"""Metrics in Prometheus' text format, by the names that dashboards for vLLM read."""

from __future__ import annotations

import math
import re
from collections import Counter as Tally
from collections.abc import Iterable, Iterator, Mapping

from ..engine.metrics import Counter, Gauge, Histogram, Metric, Vector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

#: Names of ours, and of what a proposer counts, begin with this.
PREFIX = "specdecode:"


class HttpMetrics:
    """What the server counts itself."""

    def __init__(self) -> None:
        self._finished: Tally[str] = Tally()
        self._responses: Tally[tuple[str, int]] = Tally()

    def finished(self, reason: str) -> None:
        """A completion ended."""
        self._finished[reason] += 1

    def responded(self, path: str, status: int) -> None:
        """A response began; ``path``: of the route, so that there are few."""
        self._responses[path, status] += 1

    def readings(self) -> Iterator[Metric]:
        for reason, count in sorted(self._finished.items()):
            yield Counter(name="vllm:request_success", labels={"finished_reason": reason}, total=count)
        for (path, status), count in sorted(self._responses.items()):
            labels = {"handler": path, "status": str(status)}
            yield Counter(name=f"{PREFIX}http_requests", labels=labels, total=count)


def render(metrics: Iterable[Metric], labels: Mapping[str, str]) -> str:
    """The text of ``metrics``, each with ``labels`` beside its own.

    Counters get the suffix ``_total``; a vector is a counter with the label ``position``, from 0.
    """
    families: dict[str, list[str]] = {}
    kinds: dict[str, str] = {}
    for metric in metrics:
        name, kind = _name(metric), _kind(metric)
        kinds[name] = kind
        families.setdefault(name, []).extend(_lines(name, metric, {**labels, **metric.labels}))
    parts = [f"# TYPE {name} {kinds[name]}\n" + "".join(lines) for name, lines in families.items()]
    return "".join(parts)


def _kind(metric: Metric) -> str:
    if isinstance(metric, Histogram):
        return "histogram"
    return "gauge" if isinstance(metric, Gauge) else "counter"


def _name(metric: Metric) -> str:
    name = metric.name if metric.name.startswith(("vllm:", PREFIX)) else PREFIX + metric.name
    name = re.sub(r"[^a-zA-Z0-9_:]", "_", name)
    return f"{name}_total" if _kind(metric) == "counter" else name


def _lines(name: str, metric: Metric, labels: Mapping[str, str]) -> Iterator[str]:
    if isinstance(metric, Vector):
        for position, value in enumerate(metric.value):
            yield _line(name, {**labels, "position": str(position)}, value)
    elif isinstance(metric, Histogram):
        for bound, count in metric.buckets.items():
            yield _line(f"{name}_bucket", {**labels, "le": bound}, count)
        yield _line(f"{name}_sum", labels, metric.sum)
        yield _line(f"{name}_count", labels, metric.count)
    else:
        yield _line(name, labels, metric.value)


def _line(name: str, labels: Mapping[str, str], value: float) -> str:
    told = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
    number = str(int(value)) if math.isfinite(value) and value == int(value) else repr(float(value))
    return f"{name}{{{told}}} {number}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
