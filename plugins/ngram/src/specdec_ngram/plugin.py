"""What the plugin manager loads; importing it costs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from specdecode.contract import BuildContext, Needs, PlanContext, Proposer, ProposerSpec, Tokens
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
    return Needs(width=length, depth=length, tokens=Tokens.HISTORY)


def _build(config: NgramConfig, context: BuildContext) -> Proposer:
    from .proposer import NgramProposer

    return NgramProposer(config)
