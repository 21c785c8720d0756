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
    """One reading. ``value``: a number of counters and gauges, a list of vectors, a dict of histograms."""

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

    def set(self, total: float) -> None:
        """Take over a count kept elsewhere."""
        self.total = max(self.total, total)

    @property
    def value(self) -> float:
        return self.total


@attrs.define(kw_only=True)
class Gauge(Metric):
    """Goes up and down."""

    read: Callable[[], float] = float

    @property
    def value(self) -> float:
        return self.read()


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


class EngineMetrics:
    """All metrics of one engine. ``depth``: most draft positions a step (0: no speculation)."""

    def __init__(self, depth: int) -> None:
        # name in vLLM; counts of drafting are of verified drafts, and never count the bonus token
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
        self.preemptions = Counter(name="vllm:num_preemptions")
        self.time_to_first_token = Histogram(name="vllm:time_to_first_token_seconds")
        self.inter_token = Histogram(name="vllm:inter_token_latency_seconds")
        self.end_to_end = Histogram(name="vllm:e2e_request_latency_seconds")
        # no twin there
        self.steps = Counter(name="specdecode:steps")
        self.decode_steps = Counter(name="specdecode:decode_steps")
        self.decode_tokens = Counter(name="specdecode:decode_tokens")
        self.draft_step_tokens = Counter(name="specdecode:draft_step_tokens")
        self.drafts_dropped = Counter(name="specdecode:drafts_dropped_by_fault")
        self.proposer_failures = Counter(name="specdecode:proposer_failures")
        self.target_seconds = Counter(name="specdecode:target_seconds")
        self.verify_seconds = Counter(name="specdecode:verify_seconds")
        self.propose_seconds = Counter(name="specdecode:propose_seconds")
        self._gauges: list[Gauge] = []
        self._speculative = depth > 0

    def gauge(self, name: str, read: Callable[[], float]) -> None:
        """Add a reading that is taken when asked for."""
        self._gauges.append(Gauge(name=name, read=read))

    def verified(self, stats: RequestStats, drafted: int, accepted: int, tokens: int, *, first: bool) -> None:
        """A row drew ``tokens`` tokens: ``accepted`` of ``drafted`` drafts, and the bonus token."""
        if not first:
            stats.steps += 1
            self.decode_steps.inc()
            self.decode_tokens.inc(tokens)
        if not drafted:
            return
        stats.draft_steps += 1
        stats.drafted += drafted
        stats.accepted += accepted
        self.drafts.inc()
        self.draft_tokens.inc(drafted)
        self.accepted_tokens.inc(accepted)
        self.draft_step_tokens.inc(tokens)
        for position in range(accepted):
            self.accepted_per_pos.inc(position)

    def finished(self, stats: RequestStats, num_output: int) -> None:
        """A request left the engine; ``stats`` holds its times."""
        if stats.finished is None:
            return
        self.end_to_end.observe(stats.finished - stats.arrival)
        if stats.first_token is not None and num_output > 1:
            self.inter_token.observe((stats.finished - stats.first_token) / (num_output - 1))

    def snapshot(self) -> list[Metric]:
        """Every metric that applies; those of speculation only if there is any."""
        speculation = (self.drafts, self.draft_tokens, self.accepted_tokens, self.accepted_per_pos)
        hidden = () if self._speculative else (*speculation, self.draft_step_tokens)
        own = [value for value in vars(self).values() if isinstance(value, Metric) and value not in hidden]
        return [*copy.deepcopy(own), *self._gauges]
