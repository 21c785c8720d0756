"""Chooses each step how much to draft: what pays, and now and then what might."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence

import attrs
import numpy as np

from .acceptance import Acceptance, Verified
from .choice import best_lengths, best_width, expected_tokens
from .costs import DraftCosts, StepCosts, bucket
from .resting import STAND_UP, WAKE_MARGIN, Gaps, Rest, best_waking
from .scores import ScoreScale

# Why a step drafts what it drafts, as counted in ``specdecode:draft_length_reasons``.
START = "start"  #: nothing, to learn what a plain step of this load costs
GAIN = "gain"  #: what pays best
NO_GAIN = "no_gain"  #: nothing, for no draft pays
EXPLORE = "explore"  #: more than what pays, to see whether it would, or less, to see what that costs
REST = "rest"  #: nothing, and the proposer is not fed, for no draft has paid for a while
REASONS = (START, GAIN, NO_GAIN, EXPLORE, REST)

#: Most time that exploring may cost, as a share of all.
EXPLORING = 0.01
#: Most that is saved up for it, in steps.
SAVED = 8.0
#: Steps from one exploration to the next, at least.
APART = 16
#: What a change of the width must promise, as a share of tokens a second.
MARGIN = 0.01
#: Plain steps of a load to be timed; beside prompts none is.
STARTS = 4
#: Steps of an exploration where rows are alike: the first makes the drafts that the second verifies.
PROBE_STEPS = 2
#: The same of rows that caught up for it: that is dear, so that more is asked of them.
CAUGHT_UP_STEPS = 8
#: What of the time saved by resting goes into that, as a share.
CATCHING_UP = 0.25
#: Rows and tokens a row of a step that products bind: by it tokens computed again are charged.
_DENSE = (64, 8)


@attrs.define
class _Exploring:
    """Time saved up for exploring, and what is under way."""

    credit: float = 0.0  #: seconds
    since: int = 0  #: steps
    width: int = 0
    left: int = 0  #: steps

    def saved(self, seconds: float, more: float = 0.0) -> None:
        """A step of so many seconds was none of exploring; ``more``: of them go into it beside the usual."""
        self.credit = min(self.credit + EXPLORING * seconds + more, SAVED * seconds)
        self.since += 1

    def affords(self, loss: float) -> bool:
        """Whether ``loss`` seconds are there; they are spent then."""
        if self.since < APART or self.credit < loss:
            return False
        self.credit, self.since = self.credit - max(loss, 0.0), 0
        return True

    def full(self, seconds: float) -> bool:
        """Whether steps of so many seconds save up no more."""
        return self.credit > 0.99 * SAVED * seconds

    def begin(self, width: int, steps: int) -> None:
        """Explore ``width`` in the next ``steps`` steps."""
        self.width, self.left = width, steps


class Pacer:
    """The draft length of each request, each step, by what its drafts gain and what the batch's step costs.

    It knows what was verified in earlier steps and how long these took, and never looks at a draft before it
    is verified: so rules that weigh probabilities keep their law.

    Where all rows of a step compute as many tokens (:meth:`alike`), all are given the width that pays best
    for all of them; where a step costs by its tokens in all (:meth:`each`), every request its own.

    Where no draft of rows that are alike has paid for a while, the proposer rests: it is not fed, so that
    what it keeps of these rows falls behind. They may draft again when they have caught up (``waking``);
    rows that come new have nothing to catch up with, and show whether drafts would be accepted now.

    Args:
        width: most drafts of a row.
        widths: ascending, from 0 to ``width``: those worth telling apart.
        chain: whether drafts are chains.
        lengths: ``lengths(drafts, rows)`` counts so many rows that were given so many drafts.
        reasons: ``reasons(why)`` counts steps.
    """

    def __init__(
        self,
        *,
        width: int,
        widths: Sequence[int],
        chain: bool,
        lengths: Callable[[int, int], None],
        reasons: Callable[[str], None],
    ) -> None:
        self.whole = StepCosts()  #: of steps of rows that are alike, drafting included
        self.target = StepCosts()  #: of other steps, without drafting
        self.drafting = DraftCosts()  #: of these
        self.acceptance = Acceptance(width, chain=chain)
        self.scores = ScoreScale()
        self.offered = 0  #: most drafts of a row, by the last choice
        self.width = 0  #: the last choice of :meth:`alike`
        self.speedup = 1.0  #: over plain steps, as the last choice promised
        self.held: int | None = None  #: for measurements: the width of :meth:`alike`, whatever pays
        self.feeds = True  #: whether the step that :meth:`alike` chose feeds the proposer
        self.waking: tuple[Hashable, ...] = ()  #: rows that are to catch up before that step
        self.widths = tuple(widths)
        self._lengths: dict[Hashable, int] = {}
        self._exploring, self._rest = _Exploring(), Rest()
        self._why: str | None = None  # of the last choice
        self._starts: Counter[tuple[StepCosts, int]] = Counter()
        self._count_length, self._count_reason = lengths, reasons

    def length(self, row: Hashable) -> int:
        """Drafts for ``row``, as last chosen; of one that was in no choice yet, as of its neighbours."""
        return self._lengths.get(row, self.width)

    @property
    def resting(self) -> bool:
        """Whether the proposer rests, but for what is explored."""
        return self._rest.on and self.held is None

    @property
    def _again(self) -> float:
        """Seconds of a token that is computed again."""
        return self.whole.curve.seconds(*_DENSE) / (_DENSE[0] * _DENSE[1])

    # -- what happened --------------------------------------------------------------------------
    def verified(self, step: Sequence[Verified]) -> None:
        """What a step made of its drafts."""
        self.acceptance.observe(step)
        self.scores.observe(step)

    def know_rest(self, shares: Mapping[int, float]) -> None:
        """Of so many rows a plain step without the proposer costs so much of one with it, as measured."""
        self._rest.known = {bucket(rows): min(1.0, share) for rows, share in shares.items()}

    def rested(self, rows: int, seconds: float) -> None:
        """A plain step of ``rows`` rows, the proposer left out, took ``seconds``."""
        # What feeding costs is learned first; then these steps tell what all sizes of that load cost now.
        if self.whole.timed(rows, 1) and self._rest.learn(rows, seconds / self.whole.seconds(rows, 1)):
            return
        self.whole.observe(rows, 1, seconds / self._rest.share(rows))

    def forget_all(self) -> None:
        """Start anew with the drafts of other texts: what was learned of acceptance and costs is gone."""
        self.acceptance = Acceptance(self.acceptance.width, chain=self.acceptance.chain)
        self.scores = ScoreScale()
        for costs in (self.whole, self.target):
            costs.replace(costs.curve, drafting=costs.with_drafting)
        self.drafting, self._exploring, self.width = DraftCosts(), _Exploring(), 0
        self._rest = self._rest.anew()
        self._lengths.clear()
        self._starts.clear()

    def forget(self, row: Hashable) -> None:
        """The request ended."""
        self._lengths.pop(row, None)
        self.acceptance.forget(row)

    # -- what to do -----------------------------------------------------------------------------
    def alike(
        self,
        rows: Sequence[Hashable],
        limits: Sequence[int],
        widths: Sequence[int],
        *,
        size: int | None = None,
        gaps: Gaps | None = None,
    ) -> int:
        """The width of the next step of ``rows``; ``feeds`` and ``waking`` go with it.

        Args:
            limits: most drafts of each row, if it has caught up.
            size: rows that are computed, padding with them; None: these.
            widths: ascending, 0 among them: what such a step may have.
            gaps: how far each row is behind; None: the proposer is fed in every step.
        """
        self.feeds, self.waking = True, ()
        if self.held is not None:
            self._rest.over()
        if self.held is not None or not any(limits):
            self.feeds = not self.resting
            return self._alike(rows, limits, self.held or 0, None)
        count, exploring = size or len(rows), self._exploring
        able = _caught_up(limits, gaps)
        if self._starts_with(self.whole, count):
            return self._alike(rows, able, 0, START)
        if exploring.left and exploring.width in widths and any(able):
            exploring.left -= 1
            return self._alike(rows, able, exploring.width, EXPLORE)

        def seconds(width: int) -> float:
            fed = self.whole.seconds(count, 1 + width)
            return fed if width or gaps is None else fed * self._rest.share(count)

        if not self.whole.with_drafting:
            widths = _within_reach(widths, self.whole.widest(count) - 1)
        gains = self.acceptance.gains(rows) * self.acceptance.shares(rows)
        if self.resting and self._promising(gains, limits, able, widths, seconds):
            self._rest.over()
        width = 0 if self.resting else self._best_width(gains, able, widths, seconds)
        if gaps is not None and any(gaps.behind):
            rate = expected_tokens(gains, able, width) / seconds(width)
            waking = best_waking(gains, limits, widths, gaps, seconds=seconds, again=self._again, rate=rate)
            if waking is not None:
                self._rest.over()
                self.waking = tuple(rows[place] for place in waking.rows)
                for place in waking.rows:
                    able[place] = limits[place]
                return self._alike(rows, able, waking.width, GAIN)
        if gaps is not None and self.resting:
            return self._rest_on(rows, limits, widths, gaps, seconds)
        exploring.saved(seconds(width))
        narrower = self._unknown_below(width, widths, count)
        if narrower is not None:
            rate = expected_tokens(gains, able, width) / seconds(width)
            loss = PROBE_STEPS * (seconds(narrower) - expected_tokens(gains, able, narrower) / rate)
            if exploring.affords(loss):
                exploring.begin(narrower, PROBE_STEPS - 1)
                return self._alike(rows, able, narrower, EXPLORE)
        wider = next((more for more in widths if more > width), width)
        loss = PROBE_STEPS * (seconds(wider) - seconds(width))
        if width < min(wider, max(able)) and exploring.affords(loss):
            exploring.begin(wider, PROBE_STEPS - 1)
            return self._alike(rows, able, wider, EXPLORE)
        if width:
            self._rest.over()
            return self._alike(rows, able, width, GAIN)
        if gaps is not None and not self._promising(gains, limits, able, widths, seconds):
            self.feeds = not self._rest.found_no_gain(count)
        return self._alike(rows, able, 0, NO_GAIN if self.feeds else REST)

    def _unknown_below(self, width: int, widths: Sequence[int], rows: int) -> int | None:
        """The next narrower width, if steps of it were measured when the engine started and not since.

        What is learned of others is taken for common to all of that load, and its own is not seen: plain
        steps may have got cheaper by more than drafts gain.
        """
        below = max((own for own in widths if own < width), default=None)
        if below is None or not self.whole.with_drafting or self.whole.known(rows, 1 + below):
            return None
        return below

    def _promising(
        self,
        gains: np.ndarray,
        limits: Sequence[int],
        able: Sequence[int],
        widths: Sequence[int],
        seconds: Callable[[int], float],
    ) -> bool:
        """Whether drafts would pay if nobody were behind, and somebody is not: then who comes new is fed."""
        if not any(able):
            return False
        best = best_width(gains, limits, widths, seconds)
        return best.rate * seconds(0) > len(gains) * (1 + WAKE_MARGIN)

    def _best_width(
        self,
        gains: np.ndarray,
        limits: Sequence[int],
        widths: Sequence[int],
        seconds: Callable[[int], float],
    ) -> int:
        """What pays best; the last width, as long as nothing is better by enough."""
        best = best_width(gains, limits, widths, seconds)
        self.speedup = best.rate * seconds(0) / len(gains)
        if best.width != self.width and self.width in widths:
            rate = expected_tokens(gains, limits, self.width) / seconds(self.width)
            if best.rate < rate * (1 + MARGIN):
                return self.width
        return best.width

    def _rest_on(
        self,
        rows: Sequence[Hashable],
        limits: Sequence[int],
        widths: Sequence[int],
        gaps: Gaps,
        seconds: Callable[[int], float],
    ) -> int:
        """A step without the proposer, or one to see whether it would pay now.

        Rows that came new are asked at once, or never. Where none come, some of the others catch up for it,
        those that are the least behind: all of them, or as many as all that was saved up is enough for.
        """
        exploring, able, plain = self._exploring, _caught_up(limits, gaps), seconds(0)
        self.speedup = 1.0
        self.acceptance.fade()
        wider = next((width for width in widths if width), 0)
        loss = seconds(wider) - plain
        if min(wider, max(able)):
            exploring.saved(plain)
            if exploring.affords(PROBE_STEPS * loss):
                exploring.begin(wider, PROBE_STEPS - 1)
                return self._alike(rows, able, wider, EXPLORE)
        elif wider:
            exploring.saved(plain, CATCHING_UP * plain * (1 / self._rest.share(len(rows)) - 1))
            loss, again = CAUGHT_UP_STEPS * loss + STAND_UP * plain, self._again
            lags = sorted((lag, place) for place, lag in enumerate(gaps.behind) if limits[place])
            costs = loss + again * np.cumsum([lag for lag, _ in lags])
            count = int((costs <= exploring.credit).sum())
            enough = count == len(lags) or (count and exploring.full(plain))
            if enough and exploring.affords(costs[count - 1]):
                exploring.begin(wider, CAUGHT_UP_STEPS)
                self.waking = tuple(rows[place] for _, place in lags[:count])
                return self._alike(rows, able, 0, EXPLORE)
        self.feeds = False
        return self._alike(rows, able, 0, REST)

    def each(self, rows: Sequence[Hashable], limits: Sequence[int]) -> None:
        """Choose the length of each of ``rows``; ``limits``: most drafts of each."""
        if not any(limits):
            return self._tell(rows, limits, None)
        count = len(rows)
        if self._starts_with(self.target, count):
            return self._tell(rows, [0] * count, START)

        def target(tokens: float) -> float:
            return self.target.seconds(count, tokens)

        def drafting(width: int) -> float:
            return self.drafting.seconds(count, width)

        gains, shares = self.acceptance.gains(rows), self.acceptance.shares(rows)
        widths = _within_reach(self.widths, self.drafting.widest(count))
        best = best_lengths(gains, shares, limits, widths, target, drafting)
        self.speedup = best.rate * (target(1.0) + drafting(0)) / count
        self._exploring.saved(best.seconds)
        more = tuple(min(length + 1, limit) for length, limit in zip(best.lengths, limits, strict=True))
        if more != best.lengths:
            loss = target(1 + sum(more) / count) + drafting(max(more)) - best.seconds
            if self._exploring.affords(loss):
                return self._tell(rows, more, EXPLORE)
        return self._tell(rows, best.lengths, GAIN if best.width else NO_GAIN)

    def keep(self, rows: Sequence[Hashable], scores: Sequence[Sequence[float]]) -> list[int]:
        """How many of the drafts that were made are worth their place in the next step, by their scores.

        It looks at drafts that are not verified, so that it is only for rules that compare tokens.

        Args:
            rows: those that decode.
            scores: of each row's drafts, in their order; empty: it has none.
        """
        made = [len(own) for own in scores]
        if self._why == EXPLORE or not any(made):
            return made
        gains = self.acceptance.gains(rows)[:, : max(made)]
        for row, own in zip(gains, scores, strict=True):
            told = self.scores.gains(np.asarray(own, float), row[: len(own)])
            row[: len(own)] = np.minimum.accumulate(told)

        def target(tokens: float) -> float:
            return self.target.seconds(len(rows), tokens)

        best = best_lengths(gains, np.ones_like(gains), made, (max(made),), target, lambda width: 0.0)
        self._lengths.update(zip(rows, best.lengths, strict=True))
        return list(best.lengths)

    def _starts_with(self, costs: StepCosts, rows: int) -> bool:
        """Whether a plain step is to be timed first.

        Not where all sizes were measured before, drafting included, nor where none could be in a while.
        """
        if costs.with_drafting or costs.timed(rows, 1):
            return False
        self._starts[costs, bucket(rows)] += 1
        return self._starts[costs, bucket(rows)] <= STARTS

    def _alike(self, rows: Sequence[Hashable], limits: Sequence[int], width: int, why: str | None) -> int:
        self.width = width
        self._tell(rows, [min(limit, width) for limit in limits], why)
        return width

    def _tell(self, rows: Sequence[Hashable], lengths: Sequence[int], why: str | None) -> None:
        self._lengths.update(zip(rows, lengths, strict=True))
        self.offered, self._why = max(lengths, default=0), why
        if why is not None:
            self._count_reason(why)
            for length, count in Counter(lengths).items():
                self._count_length(length, count)


def _caught_up(limits: Sequence[int], gaps: Gaps | None) -> list[int]:
    """Most drafts of each row now: none of one that is behind."""
    if gaps is None:
        return list(limits)
    return [0 if lag else limit for limit, lag in zip(limits, gaps.behind, strict=True)]


def _within_reach(widths: Sequence[int], widest: int) -> tuple[int, ...]:
    """Those up to the next wider one than any that was timed: what drafting costs is not known before."""
    ends = [width for width in widths if width > widest][:1]
    return tuple(width for width in widths if width <= max(ends, default=widest))
