"""The keys of ``speculative_config`` that belong to these methods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from specdecode.contract import MAX_SPECULATIVE_TOKENS, option, within

_PROPOSERS = (
    'each as a speculative_config of its own: {"method": ..., ...}, or {"model": ...} of a checkpoint'
)


def _at_least(count: int) -> Any:
    def check(_: Any, __: Any, value: tuple[Any, ...] | None) -> None:
        if value is not None and len(value) < count:
            raise ValueError(f"must be a list of at least {count}, got {len(value)}")

    return check


def _share(_: Any, __: Any, value: float) -> None:
    if not 0 <= value <= 0.5:
        raise ValueError(f"must be between 0 and 0.5, got {value!r}")


@attrs.frozen(kw_only=True)
class CascadeConfig:
    """The first of ``proposers`` whose score is high enough drafts; the last takes what is left."""

    proposers: tuple[Mapping[str, Any], ...] = option(
        f"the methods in the order in which they are asked, {_PROPOSERS}", validator=_at_least(2)
    )
    min_score: float = option(
        "fewest drafts that a row's draft must be expected to have accepted, by the scores that its method "
        "gives, or the next method is asked; 0: any draft will do",
        default=0.0,
        validator=within(0),
    )


@attrs.frozen(kw_only=True)
class ExtendConfig:
    """The first of ``proposers`` drafts, each other one goes on from where the one before ended."""

    proposers: tuple[Mapping[str, Any], ...] = option(
        f"a method that drafts chains, then such as can go on from drafts, {_PROPOSERS}",
        validator=_at_least(2),
    )


@attrs.frozen(kw_only=True)
class AutoConfig:
    """Learns which method pays, for each namespace and load."""

    proposers: tuple[Mapping[str, Any], ...] | None = option(
        f"the methods to choose among, {_PROPOSERS}; none: every installed one that wants no checkpoint",
        default=None,
        validator=_at_least(1),
    )
    num_speculative_tokens: int | None = option(
        "draft tokens a step of the methods that are found; where proposers are given they say it themselves",
        default=None,
        validator=within(1, MAX_SPECULATIVE_TOKENS),
    )
    exploration: float = option(
        "most of the steps that may go to a method that seems to pay less, to see whether it still does",
        default=0.05,
        validator=_share,
    )
    trial_steps: int = option(
        "steps that a choice stands for; the first four of them are not judged",
        default=16,
        validator=within(8),
    )

    def __attrs_post_init__(self) -> None:
        if self.proposers is None and self.num_speculative_tokens is None:
            raise ValueError("num_speculative_tokens is required where proposers is left out")
        if self.proposers is not None and self.num_speculative_tokens is not None:
            raise ValueError("num_speculative_tokens has no effect beside proposers, which say it themselves")
