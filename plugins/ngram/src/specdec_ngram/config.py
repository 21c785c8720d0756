"""The keys of ``speculative_config`` that belong to this method."""

from __future__ import annotations

from typing import Any

import attrs
from specdecode.contract import LengthFields, option, within

#: Windows where a bound is left out, chosen by measured acceptance (see the README).
DEFAULT_MIN = 2
DEFAULT_MAX = 5
#: Each window costs an index entry for every token of a request.
LONGEST_WINDOW = 32


def _not_above_max(config: NgramConfig, _: Any, value: int | None) -> None:
    longest = config.prompt_lookup_max
    if value is not None and longest is not None and value > longest:
        raise ValueError(f"must be at most prompt_lookup_max ({longest}), got {value}")


@attrs.frozen(kw_only=True)
class NgramConfig(LengthFields):
    """Prompt lookup matches the last ``n`` tokens, the longest ``n`` of ``min..max`` that occurred before."""

    prompt_lookup_max: int | None = option(
        f"most tokens to match; none: {DEFAULT_MAX}, or prompt_lookup_min if that is more",
        default=None,
        validator=within(1, LONGEST_WINDOW),
    )
    prompt_lookup_min: int | None = option(
        f"fewest tokens to match; none: {DEFAULT_MIN}, or prompt_lookup_max if that is less",
        default=None,
        validator=[within(1, LONGEST_WINDOW), _not_above_max],
    )

    @property
    def windows(self) -> tuple[int, int]:
        """The bounds in force: fewest and most tokens to match."""
        shortest, longest = self.prompt_lookup_min, self.prompt_lookup_max
        if longest is None:
            longest = max(DEFAULT_MAX, shortest or 0)
        if shortest is None:
            shortest = min(DEFAULT_MIN, longest)
        return shortest, longest
