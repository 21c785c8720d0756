"""What an engine takes to choose draft lengths: by load, by a table, or by what pays."""

from __future__ import annotations

from ..contract import ConfigError, Shape
from ..engine.metrics import EngineMetrics
from ..engine.pacing import REASONS, Pacer, draft_widths
from ..engine.seating import may_rest
from ..plugins import Prepared

#: Most tokens of a step that verifies several drafts a row, where there is a choice: more never paid.
_MOST_TOKENS = 768


def check_schedule(prepared: Prepared) -> None:
    """Refuse a table that asks for more than the method drafts.

    Raises:
        ConfigError: names both numbers.
    """
    schedule = prepared.policy.num_speculative_tokens_per_batch_size or ()
    most = max((tokens for _, _, tokens in schedule), default=0)
    if most > prepared.needs.width:
        raise ConfigError(
            f"speculative_config.num_speculative_tokens_per_batch_size asks for {most} tokens, and "
            f"{prepared.method} drafts {prepared.needs.width} at most: raise num_speculative_tokens, or "
            "lower the table"
        )


def widths_of(prepared: Prepared | None) -> tuple[int, ...]:
    """Numbers of drafts of a row that steps may have, ascending from 0."""
    if prepared is None:
        return (0,)
    width, policy = prepared.needs.width, prepared.policy
    if policy.adaptive:
        return draft_widths(width)
    scheduled = (k for _, _, k in policy.num_speculative_tokens_per_batch_size or ())
    return tuple(sorted({0, width, *(min(k, width) for k in scheduled)}))


def rests(prepared: Prepared) -> bool:
    """Whether there are plain steps that leave the method out."""
    return prepared.policy.adaptive and may_rest(prepared.needs)


def most_tokens(prepared: Prepared | None) -> int | None:
    """Most tokens of a step that it is worth to prepare; None: whatever the method drafts."""
    return _MOST_TOKENS if prepared is not None and prepared.policy.adaptive else None


def make_pacer(prepared: Prepared, metrics: EngineMetrics) -> Pacer | None:
    """What chooses draft lengths by what pays, if it was asked for."""
    if not prepared.policy.adaptive:
        return None
    needs = prepared.needs
    lengths, reasons = metrics.count_lengths(needs.width, REASONS)
    pacer = Pacer(
        width=needs.width,
        widths=draft_widths(needs.width),
        chain=needs.shape is Shape.CHAIN,
        lengths=lengths,
        reasons=reasons,
    )
    metrics.gauge("specdecode:expected_speedup", lambda: pacer.speedup)
    return pacer
