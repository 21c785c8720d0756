"""What an engine counted during a run, and the figures of speculation that follow from it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import attrs


class Reading(Protocol):
    """One entry of ``LLM.get_metrics()``."""

    name: str
    value: Any


@attrs.frozen(kw_only=True)
class Counters:
    """Counts between two readings; engines only count up, so a run is the difference of two."""

    generated: int = 0  #: tokens, the first of each request included
    decode_tokens: int = 0  #: tokens of decode steps: all but the first of each request
    decode_steps: int = 0  #: target forwards of one request that gave tokens, but for the first
    drafts: int = 0  #: of them, those that verified drafts
    draft_tokens: int = 0
    accepted: int = 0
    accepted_per_position: tuple[int, ...] = ()

    @classmethod
    def read(cls, metrics: Iterable[Reading]) -> Counters:
        """From ``LLM.get_metrics()``; an engine without speculation has none of the draft counters."""
        values = {metric.name: metric.value for metric in metrics}

        def count(name: str) -> int:
            return int(values.get(name, 0))

        return cls(
            generated=count("vllm:generation_tokens"),
            decode_tokens=count("specdecode:decode_tokens"),
            decode_steps=count("specdecode:decode_steps"),
            drafts=count("vllm:spec_decode_num_drafts"),
            draft_tokens=count("vllm:spec_decode_num_draft_tokens"),
            accepted=count("vllm:spec_decode_num_accepted_tokens"),
            accepted_per_position=tuple(values.get("vllm:spec_decode_num_accepted_tokens_per_pos", ())),
        )

    def __sub__(self, earlier: Counters) -> Counters:
        return self._combined(earlier, -1)

    def __add__(self, other: Counters) -> Counters:
        return self._combined(other, 1)

    def _combined(self, other: Counters, sign: int) -> Counters:
        mine, theirs = self.accepted_per_position, other.accepted_per_position
        length = max(len(mine), len(theirs))
        mine, theirs = (v + (0,) * (length - len(v)) for v in (mine, theirs))
        numbers = attrs.asdict(self, filter=attrs.filters.exclude("accepted_per_position"))
        return Counters(
            **{name: value + sign * getattr(other, name) for name, value in numbers.items()},
            accepted_per_position=tuple(a + sign * b for a, b in zip(mine, theirs, strict=True)),
        )

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens of a step that verified drafts, the bonus token counted; None if none did."""
        return 1 + self.accepted / self.drafts if self.drafts else None

    @property
    def tokens_per_target_step(self) -> float | None:
        """Mean tokens of a decode step, with drafts or without; None if there was none."""
        return self.decode_tokens / self.decode_steps if self.decode_steps else None

    @property
    def acceptance_per_position(self) -> tuple[float, ...] | None:
        """Of the steps that verified drafts, the share that accepted the draft at each position."""
        if not self.drafts:
            return None
        return tuple(count / self.drafts for count in self.accepted_per_position)
