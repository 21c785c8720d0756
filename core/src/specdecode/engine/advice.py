"""One line of advice on speculation, by the rules of ``docs/tuning.md``. Imports no torch."""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from .metrics import EngineMetrics

logger = logging.getLogger(__name__)

#: Acceptance rates between which the draft length is left alone.
LOW_ACCEPTANCE = 0.4
HIGH_ACCEPTANCE = 0.8
#: Fewer verifications than this say nothing.
MIN_DRAFTS = 32
#: Seconds between two lines.
INTERVAL_SECONDS = 60.0


@attrs.frozen(kw_only=True)
class SpeculationFigures:
    """What was counted in a span of time; the difference of two readings is the span between them."""

    drafts: int = 0  #: verifications that had drafts
    draft_tokens: int = 0
    accepted: int = 0
    decode_steps: int = 0  #: target forwards of one request that gave tokens, but for the first
    decode_tokens: int = 0  #: the tokens they gave
    target_seconds: float = 0.0
    propose_seconds: float = 0.0

    @classmethod
    def read(cls, metrics: EngineMetrics) -> SpeculationFigures:
        """Since the engine started."""
        return cls(
            drafts=int(metrics.drafts.total),
            draft_tokens=int(metrics.draft_tokens.total),
            accepted=int(metrics.accepted_tokens.total),
            decode_steps=int(metrics.decode_steps.total),
            decode_tokens=int(metrics.decode_tokens.total),
            target_seconds=metrics.target_seconds.total,
            propose_seconds=metrics.propose_seconds.total,
        )

    def __sub__(self, earlier: SpeculationFigures) -> SpeculationFigures:
        return self._combined(earlier, operator.sub)

    def __add__(self, other: SpeculationFigures) -> SpeculationFigures:
        return self._combined(other, operator.add)

    def _combined(self, other: SpeculationFigures, combine: Callable[[Any, Any], Any]) -> SpeculationFigures:
        names = [attribute.name for attribute in attrs.fields(type(self))]
        return SpeculationFigures(
            **{name: combine(getattr(self, name), getattr(other, name)) for name in names}
        )

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.draft_tokens

    @property
    def tokens_per_step(self) -> float:
        return self.decode_tokens / self.decode_steps

    @property
    def draft_overhead(self) -> float:
        """Seconds of drafting for each second of target forwards."""
        return self.propose_seconds / self.target_seconds if self.target_seconds else 0.0

    @property
    def best_speedup(self) -> float:
        """What would be gained if a target forward took no longer with drafts than without."""
        return self.tokens_per_step / (1 + self.draft_overhead)


@attrs.frozen
class Advice:
    """``loss``: speculation costs more than it gives, or throws most drafts away."""

    line: str
    loss: bool
    timed: bool = False  #: by seconds of an engine's own steps, which may hold what happens once


def advise(
    figures: SpeculationFigures, speedup: float | None = None, *, adaptive: bool = False
) -> Advice | None:
    """What to change; None if nothing, or if too little was drafted to tell.

    Args:
        figures: of the span looked at.
        speedup: over plain decoding, where that was measured; else only a certain loss is told.
        adaptive: whether core chooses draft lengths, which makes ``num_speculative_tokens`` the most: to
            shorten it gains nothing.
    """
    if figures.drafts < MIN_DRAFTS or not figures.draft_tokens or not figures.decode_steps:
        return None
    shorten = () if adaptive else ("shorten num_speculative_tokens",)
    accepted = f"{figures.acceptance_rate:.0%} of the drafts were accepted"
    if (figures.best_speedup if speedup is None else speedup) < 1:
        measured = (
            f"drafting took {figures.draft_overhead:.2f}x the target's time for "
            f"{figures.tokens_per_step:.2f} tokens a step"
            if speedup is None
            else f"{speedup:.2f}x the speed of plain decoding"
        )
        return Advice(
            f"speculation loses time ({measured}; {accepted}): "
            + ", ".join((*shorten, "try another method", "or leave speculation out for this work")),
            loss=True,
            timed=speedup is None,
        )
    if figures.acceptance_rate < LOW_ACCEPTANCE:
        return Advice(
            f"{accepted}, less than {LOW_ACCEPTANCE:.0%}: " + ", or ".join((*shorten, "try another method")),
            loss=True,
        )
    if figures.acceptance_rate > HIGH_ACCEPTANCE:
        return Advice(
            f"{accepted}, more than {HIGH_ACCEPTANCE:.0%}: lengthen num_speculative_tokens", loss=False
        )
    return None


class Advisor:
    """Logs advice at most once in ``interval`` seconds: a loss as a warning, a chance as information.

    A loss of time must show in two spans in a row: the first steps of a size may compile kernels, and that is
    no cost of drafting.

    Args:
        adaptive: as :func:`advise` takes it.
    """

    def __init__(
        self,
        *,
        adaptive: bool = False,
        interval: float = INTERVAL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._adaptive = adaptive
        self._interval = interval
        self._clock = clock
        self._last: float | None = None
        self._seen = SpeculationFigures()  # since it last judged
        self._lost = False  # by the last judgement

    def tell(self, figures: SpeculationFigures) -> Advice | None:
        """Add ``figures`` to those not judged yet, and judge them if there are enough; what was logged."""
        self._seen += figures
        now = self._clock()
        if self._last is not None and now - self._last < self._interval:
            return None
        if self._seen.drafts < MIN_DRAFTS:
            return None
        advice, self._seen = advise(self._seen, adaptive=self._adaptive), SpeculationFigures()
        lost, self._lost = self._lost, advice is not None and advice.timed
        if self._lost and not lost:
            return None
        if advice is not None:
            self._last = now
            logger.log(logging.WARNING if advice.loss else logging.INFO, "%s", advice.line)
        return advice
