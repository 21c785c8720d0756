"""What the plugin manager loads; importing it costs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from specdecode.contract import (
    BuildContext,
    Needs,
    Place,
    PlanContext,
    Proposer,
    ProposerSpec,
    Ranks,
    Tokens,
)
from specdecode.plugins import hookimpl

if TYPE_CHECKING:
    from .config import NgramConfig


@hookimpl
def specdecode_proposers() -> Iterator[ProposerSpec]:
    from .config import NgramConfig

    yield ProposerSpec(
        name="ngram",
        summary="prompt lookup: repeat what followed the last tokens before",
        api=1,
        config=NgramConfig,
        needs=_needs,
        build=_build,
    )


def _needs(config: NgramConfig, context: PlanContext) -> Needs:
    length = config.num_speculative_tokens
    if not context.target.device.startswith("cuda"):
        return Needs(width=length, depth=length, tokens=Tokens.HISTORY, scores=True, continues=True)
    return Needs(
        width=length,
        depth=length,
        tokens=Tokens.HISTORY,
        place=Place.DEVICE,
        graphs=True,
        ranks=Ranks.ALL,
        scores=True,
        continues=True,
    )


def _build(config: NgramConfig, context: BuildContext) -> Proposer:
    if context.needs.place is Place.DEVICE:
        from .device import DeviceNgramProposer

        return DeviceNgramProposer(config)
    from .proposer import NgramProposer

    return NgramProposer(config)
