"""What an engine counted during a run, and the figures of speculation that follow from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import attrs


class Reading(Protocol):
    """One entry of ``LLM.get_metrics()``."""

    name: str
    value: Any
    labels: Mapping[str, str]


#: Field of :class:`Counters` -> metric.
_COUNTS = {
    "generated": "vllm:generation_tokens",
    "steps": "specdecode:steps",
    "decode_tokens": "specdecode:decode_tokens",
    "decode_steps": "specdecode:decode_steps",
    "drafts": "vllm:spec_decode_num_drafts",
    "draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}
_SECONDS = {
    "target_seconds": "specdecode:target_seconds",
    "verify_seconds": "specdecode:verify_seconds",
    "propose_seconds": "specdecode:propose_seconds",
}
_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
#: There is one where core chooses draft lengths.
_EXPECTED_SPEEDUP = "specdecode:expected_speedup"
_TOKEN_GAPS = "vllm:inter_token_latency_seconds"


@attrs.frozen(kw_only=True)
class Counters:
    """Counts between two readings; engines only count up, so a run is the difference of two."""

    generated: int = 0  #: tokens, the first of each request included
    steps: int = 0  #: target forwards, each of all requests that ran
    decode_tokens: int = 0  #: tokens of decode steps: all but the first of each request
    decode_steps: int = 0  #: target forwards of one request that gave tokens, but for the first
    drafts: int = 0  #: of them, those that verified drafts
    draft_tokens: int = 0
    accepted: int = 0
    target_seconds: float = 0.0  #: of target forwards, on the device
    verify_seconds: float = 0.0  #: of sampling and verification
    propose_seconds: float = 0.0  #: of drafting
    token_gaps: int = 0  #: requests that wrote more than one token
    token_gap_seconds: float = 0.0  #: sum over them of the mean time from token to token
    accepted_per_position: tuple[int, ...] = ()
    lossy: str | None = None  #: the rule of verification, if the output has not the model's law
    adaptive: bool = False  #: core chose draft lengths

    @classmethod
    def read(cls, metrics: Iterable[Reading]) -> Counters:
        """From ``LLM.get_metrics()``; an engine without speculation has none of the draft counters."""
        metrics = list(metrics)
        values = {metric.name: metric.value for metric in metrics}
        gaps = values.get(_TOKEN_GAPS, {"count": 0, "sum": 0.0})
        counted: dict[str, Any] = {field: int(values.get(name, 0)) for field, name in _COUNTS.items()}
        counted |= {field: float(values.get(name, 0)) for field, name in _SECONDS.items()}
        return cls(
            **counted,
            token_gaps=gaps["count"],
            token_gap_seconds=gaps["sum"],
            accepted_per_position=tuple(values.get(_PER_POSITION, ())),
            lossy=next(
                (metric.labels.get("acceptance") for metric in metrics if metric.name == _PER_POSITION), None
            ),
            adaptive=_EXPECTED_SPEEDUP in values,
        )

    def __sub__(self, earlier: Counters) -> Counters:
        return self._combined(earlier, -1)

    def __add__(self, other: Counters) -> Counters:
        return self._combined(other, 1)

    def _combined(self, other: Counters, sign: int) -> Counters:
        mine, theirs = self.accepted_per_position, other.accepted_per_position
        length = max(len(mine), len(theirs))
        mine, theirs = (v + (0,) * (length - len(v)) for v in (mine, theirs))
        others = ("accepted_per_position", "lossy", "adaptive")
        numbers = attrs.asdict(self, filter=attrs.filters.exclude(*others))
        return Counters(
            **{name: value + sign * getattr(other, name) for name, value in numbers.items()},
            accepted_per_position=tuple(a + sign * b for a, b in zip(mine, theirs, strict=True)),
            lossy=self.lossy or other.lossy,
            adaptive=self.adaptive or other.adaptive,
        )

    @property
    def synthetic(self) -> bool:
        """Whether drafts were accepted by rate, whatever their tokens."""
        return self.lossy == "synthetic"

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens of a step that verified drafts, the bonus token counted; None if none did."""
        return 1 + self.accepted / self.drafts if self.drafts else None

    @property
    def acceptance_rate(self) -> float | None:
        """Share of the draft tokens that were accepted; None if there were none."""
        return self.accepted / self.draft_tokens if self.draft_tokens else None

    @property
    def tokens_per_target_step(self) -> float | None:
        """Mean tokens of a decode step, with drafts or without; None if there was none."""
        return self.decode_tokens / self.decode_steps if self.decode_steps else None

    @property
    def drafts_per_target_step(self) -> float | None:
        """Mean draft tokens of a decode step, with drafts or without; None if nothing was drafted."""
        return self.draft_tokens / self.decode_steps if self.draft_tokens and self.decode_steps else None

    @property
    def acceptance_per_position(self) -> tuple[float, ...] | None:
        """Of the steps that verified drafts, the share that accepted the draft at each position."""
        if not self.drafts:
            return None
        return tuple(count / self.drafts for count in self.accepted_per_position)

    @property
    def seconds_per_token(self) -> float | None:
        """Mean time from one token of a request to its next: without speculation, that of a step."""
        return self.token_gap_seconds / self.token_gaps if self.token_gaps else None

    @property
    def draft_seconds_per_step(self) -> float | None:
        """Mean time of drafting in a step, for all requests that ran; None if nothing was drafted."""
        return self.propose_seconds / self.steps if self.draft_tokens and self.steps else None

    @property
    def draft_overhead(self) -> float | None:
        """Time of drafting by that of target forwards; None if nothing was drafted."""
        return (
            self.propose_seconds / self.target_seconds if self.draft_tokens and self.target_seconds else None
        )
