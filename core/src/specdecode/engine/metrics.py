"""What the engine counts. Names that have a twin in vLLM keep its name, so that dashboards go on working."""

from __future__ import annotations

import bisect
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from .request import RequestStats


@attrs.define(kw_only=True)
class Metric:
    """One reading. ``value``: a number of counters and gauges, a list of vectors, a dict of histograms.

    Two readings are equal if name, labels and value are.
    """

    name: str
    labels: Mapping[str, str] = attrs.field(factory=dict)

    @property
    def value(self) -> Any:
        raise AttributeError(f"{type(self).__name__} has no value")  # subclasses say what theirs is


@attrs.define(kw_only=True)
class Counter(Metric):
    """Only grows."""

    total: float = 0

    def inc(self, amount: float = 1) -> None:
        self.total += amount

    @property
    def value(self) -> float:
        return self.total


@attrs.define(kw_only=True)
class Gauge(Metric):
    """Goes up and down; a reading, which does not change any more."""

    reading: float = 0.0

    @property
    def value(self) -> float:
        return self.reading


@attrs.define(kw_only=True)
class Vector(Metric):
    """Counters side by side, of fixed length."""

    values: list[int]

    def inc(self, index: int, amount: int = 1) -> None:
        self.values[index] += amount

    @property
    def value(self) -> list[int]:
        return self.values


@attrs.define(kw_only=True)
class Histogram(Metric):
    """Seconds, in cumulative buckets as Prometheus has them."""

    bounds: Sequence[float] = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
    counts: list[int] = attrs.Factory(lambda self: [0] * (len(self.bounds) + 1), takes_self=True)
    sum: float = 0.0
    count: int = 0

    def observe(self, seconds: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds
        self.count += 1

    @property
    def buckets(self) -> dict[str, int]:
        """Upper bound -> observations at or below it."""
        total, cumulative = 0, {}
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            total += count
            cumulative[bound] = total
        return cumulative

    @property
    def value(self) -> dict[str, Any]:
        return {"count": self.count, "sum": self.sum, "buckets": self.buckets}


class AdapterCounts:
    """What of the engine's counts is one adapter's; under other names, so that sums count nothing twice."""

    def __init__(self, name: str, labels: Mapping[str, str]) -> None:
        own = {"lora_name": name}
        self.generation_tokens = Counter(name="specdecode:lora_generation_tokens", labels=own)
        self.drafts, self.draft_tokens, self.accepted_tokens = (
            Counter(name=f"specdecode:lora_spec_decode_{what}", labels={**labels, **own})
            for what in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        )

    def delivered(self, drafted: int, used: int, kept: int) -> None:
        """As :meth:`EngineMetrics.delivered`; ``used``: accepted drafts that became part of the output."""
        self.generation_tokens.inc(kept)
        if drafted:
            self.drafts.inc()
            self.draft_tokens.inc(drafted)
            self.accepted_tokens.inc(used)

    def metrics(self, without_speculation: bool) -> list[Metric]:
        if without_speculation:
            return [self.generation_tokens]
        return [self.generation_tokens, self.drafts, self.draft_tokens, self.accepted_tokens]


class EngineMetrics:
    """All metrics of one engine.

    ``depth``: most draft positions a step (0: no speculation). ``mark``: the rule of verification, if it is
    not lossless; the metrics of speculation bear it as a label, ``acceptance="synthetic"`` for example.

    Tokens count when they become part of an output, so that the counts of drafting are parts of
    ``generation_tokens``, whatever ended a request. ``docs/metrics.md`` has the definitions.
    """

    def __init__(self, depth: int, *, mark: str | None = None) -> None:
        self._labels = {"acceptance": mark} if mark else {}
        # names in vLLM
        self.drafts = Counter(name="vllm:spec_decode_num_drafts")
        self.draft_tokens = Counter(name="vllm:spec_decode_num_draft_tokens")
        self.accepted_tokens = Counter(name="vllm:spec_decode_num_accepted_tokens")
        self.accepted_per_pos = Vector(
            name="vllm:spec_decode_num_accepted_tokens_per_pos", values=[0] * depth
        )
        self.prompt_tokens = Counter(name="vllm:prompt_tokens")
        self.generation_tokens = Counter(name="vllm:generation_tokens")
        self.prefix_queries = Counter(name="vllm:prefix_cache_queries")
        self.prefix_hits = Counter(name="vllm:prefix_cache_hits")
        self.time_to_first_token = Histogram(name="vllm:time_to_first_token_seconds")
        self.inter_token = Histogram(name="vllm:inter_token_latency_seconds")
        self.end_to_end = Histogram(name="vllm:e2e_request_latency_seconds")
        # no twin there
        self.bonus_tokens = Counter(name="specdecode:bonus_tokens")
        self.discarded_tokens = Counter(name="specdecode:discarded_tokens")
        self.draft_step_tokens = Counter(name="specdecode:draft_step_tokens")
        self.drafts_dropped = Counter(name="specdecode:drafts_dropped_by_fault")
        self.steps = Counter(name="specdecode:steps")
        self.decode_steps = Counter(name="specdecode:decode_steps")
        self.decode_tokens = Counter(name="specdecode:decode_tokens")
        self.target_seconds = Counter(name="specdecode:target_seconds")
        self.verify_seconds = Counter(name="specdecode:verify_seconds")
        self.propose_seconds = Counter(name="specdecode:propose_seconds")
        of_speculation: tuple[Metric, ...] = (
            self.drafts,
            self.draft_tokens,
            self.accepted_tokens,
            self.accepted_per_pos,
            self.bonus_tokens,
            self.discarded_tokens,
            self.draft_step_tokens,
            self.drafts_dropped,
            self.propose_seconds,
        )
        for metric in of_speculation:
            metric.labels = self._labels
        self._hidden = () if depth else tuple(metric.name for metric in of_speculation)
        self.host_waits: dict[str, Counter] = {}
        self._more: list[Callable[[], Metric]] = []
        self._by_adapter: dict[str, AdapterCounts] = {}

    def gauge(self, name: str, read: Callable[[], float]) -> None:
        """Add a gauge that is kept elsewhere."""
        self._more.append(lambda: Gauge(name=name, reading=read()))

    def follow(self, name: str, read: Callable[[], float]) -> None:
        """Add a counter that is kept elsewhere."""
        self._more.append(lambda: Counter(name=name, total=read()))

    def read(self, read: Callable[[], Metric]) -> None:
        """Add a metric that is made when it is asked for."""
        self._more.append(read)

    def include(self, metric: Metric) -> None:
        """Add a metric that its owner changes."""
        self._more.append(lambda: copy.deepcopy(metric))

    def count_waits(self, reasons: Sequence[str]) -> None:
        """Count steps that the device had to wait for the host before, by reason."""
        for reason in reasons:
            self.host_waits[reason] = Counter(name="specdecode:host_waits", labels={"reason": reason})
            self.include(self.host_waits[reason])

    def count_lengths(
        self, width: int, reasons: Sequence[str]
    ) -> tuple[Callable[[int, int], None], Callable[[str], None]]:
        """What counts chosen draft lengths, ``(length, rows)``, 0 to ``width``, and what counts reasons."""
        lengths = Vector(name="specdecode:draft_lengths", labels=self._labels, values=[0] * (width + 1))
        steps = {
            reason: Counter(name="specdecode:draft_length_reasons", labels={**self._labels, "reason": reason})
            for reason in reasons
        }
        for metric in (lengths, *steps.values()):
            self.include(metric)
        return lengths.inc, lambda reason: steps[reason].inc()

    def admitted(self, num_prompt: int, num_cached: int) -> None:
        """A completion is computed for the first time; ``num_cached`` of its prompt's tokens were cached."""
        self.prompt_tokens.inc(num_prompt)
        self.prefix_queries.inc(num_prompt)
        self.prefix_hits.inc(num_cached)

    def delivered(
        self,
        stats: RequestStats,
        *,
        drafted: int,
        accepted: int,
        kept: int,
        now: float,
        adapter: str | None = None,
    ) -> None:
        """A completion was given what a step drew for it: accepted drafts, then a token of the target's own.

        Args:
            drafted: drafts that were verified.
            accepted: drafts that were accepted.
            kept: tokens that became part of the output; the rest lies behind its end.
            now: ``time.perf_counter`` seconds.
            adapter: the name of the completion's.
        """
        self.generation_tokens.inc(kept)
        if adapter is not None:
            counts = self._by_adapter.setdefault(adapter, AdapterCounts(adapter, self._labels))
            counts.delivered(drafted, min(accepted, kept), kept)
        if stats.first_token is not None and kept:
            stats.steps += 1
            self.decode_steps.inc()
            self.decode_tokens.inc(kept)
        if stats.first_token is None and kept:
            stats.first_token = now
            self.time_to_first_token.observe(now - stats.arrival)
        if drafted:
            self._verified(stats, drafted, accepted, kept)

    def _verified(self, stats: RequestStats, drafted: int, accepted: int, kept: int) -> None:
        used = min(accepted, kept)
        stats.draft_steps += 1
        stats.drafted += drafted
        stats.accepted += used
        stats.discarded += accepted - used
        stats.bonus += kept - used
        self.drafts.inc()
        self.draft_tokens.inc(drafted)
        self.accepted_tokens.inc(used)
        self.discarded_tokens.inc(accepted - used)
        self.bonus_tokens.inc(kept - used)
        self.draft_step_tokens.inc(kept)
        for position in range(used):
            self.accepted_per_pos.inc(position)

    def finished(self, stats: RequestStats, num_output: int) -> None:
        """A request left the engine; ``stats`` holds its times."""
        if stats.finished is None:
            return
        self.end_to_end.observe(stats.finished - stats.arrival)
        if stats.first_token is not None and num_output > 1:
            self.inter_token.observe((stats.finished - stats.first_token) / (num_output - 1))

    def snapshot(self) -> list[Metric]:
        """Readings of every metric that applies: those of speculation only if there is any."""
        own = [value for value in vars(self).values() if isinstance(value, Metric)]
        shown = [metric for metric in own if metric.name not in self._hidden]
        adapters = [
            metric for counts in self._by_adapter.values() for metric in counts.metrics(bool(self._hidden))
        ]
        return [*copy.deepcopy([*shown, *adapters]), *(read() for read in self._more)]
