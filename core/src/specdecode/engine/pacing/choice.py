"""The choice itself: the drafts that make a batch fastest, by what they gain and what they cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import numpy as np

#: Widths told apart; beyond them each is 1.4 times the one before.
_WIDTHS = (1, 2, 3, 5, 7)


def draft_widths(width: int) -> tuple[int, ...]:
    """Draft lengths that are worth telling apart, ascending: 0 1 2 3 5 7 10 14 20 28 ... ``width``."""
    widths = [*_WIDTHS]
    while widths[-1] < width:
        widths.append(round(widths[-1] * 1.4))
    return (0, *(own for own in widths if own <= 0.85 * width), width)


@attrs.frozen
class Choice:
    """How much to draft, and what it promises."""

    width: int  #: the most drafts of a row
    lengths: tuple[int, ...]  #: drafts of each row
    rate: float  #: tokens a second of all rows
    seconds: float  #: of the step


def expected_tokens(gains: np.ndarray, limits: Sequence[int], width: int) -> float:
    """Tokens that a step of these rows is to give, each with ``width`` drafts or its limit."""
    made = np.arange(gains.shape[1]) < np.minimum(np.asarray(limits), width)[:, None]
    return len(gains) + float((gains * made).sum())


def best_width(
    gains: np.ndarray, limits: Sequence[int], widths: Sequence[int], seconds: Callable[[int], float]
) -> Choice:
    """One width for all rows, where a step computes as many tokens for each row: the fastest of ``widths``.

    Args:
        gains: ``[n, W]``, the chance that each draft of each row is made and accepted.
        limits: most drafts of each row.
        widths: ascending, 0 among them. Of equally fast ones the first wins.
        seconds: ``seconds(width)`` of the step.
    """
    best: Choice | None = None
    for width in widths:
        cost = seconds(width)
        rate = expected_tokens(gains, limits, width) / cost
        if best is None or rate > best.rate:
            best = Choice(width, tuple(min(limit, width) for limit in limits), rate, cost)
    assert best is not None
    return best


def best_lengths(
    gains: np.ndarray,
    shares: np.ndarray,
    limits: Sequence[int],
    widths: Sequence[int],
    target: Callable[[float], float],
    drafting: Callable[[int], float],
) -> Choice:
    """Lengths row by row, where a step costs by its tokens in all: draft by draft, the surest first.

    For each width that drafting may take the drafts of all rows are added in the order of their gains as long
    as tokens a second grow.

    Args:
        gains: ``[n, W]``, the chance that each draft is accepted if it is made; none rises in its row.
        shares: ``[n, W]``, the chance that each draft is made if it may: what is not made costs nothing.
        limits: most drafts of each row.
        widths: ascending, 0 among them.
        target: ``target(tokens)``: seconds of the target's step with so many tokens a row on the average.
        drafting: ``drafting(width)``: seconds of drafting with ``width`` drafts for the longest row.
    """
    rows = len(gains)
    cost = target(1.0) + drafting(0)
    best = Choice(0, (0,) * rows, rows / cost, cost)
    top = min(max(limits, default=0), gains.shape[1])
    if not top:
        return best
    places = np.arange(1, top + 2)
    line = np.array([target(float(tokens)) for tokens in places])
    for width in sorted({min(width, top) for width in widths if width}):
        allowed = np.arange(width) < np.asarray(limits)[:, None]
        offered = np.where(allowed, gains[:, :width], -1.0).ravel()
        order = np.argsort(-offered, kind="stable")[: int(allowed.sum())]
        made = shares[:, :width].ravel()[order]
        tokens = rows + np.concatenate(([0.0], (offered[order] * made).cumsum()))
        counts = np.concatenate(([0.0], made.cumsum()))
        seconds = np.interp(1 + counts / rows, places, line) + drafting(width)
        rates = tokens / seconds
        count = int(rates.argmax())
        if rates[count] > best.rate and count:
            lengths = tuple(map(int, np.bincount(order[:count] // width, minlength=rows)))
            best = Choice(max(lengths), lengths, float(rates[count]), float(seconds[count]))
    return best
