"""What the plugin manager loads; importing it costs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from specdecode.contract import BuildContext, Needs, PlanContext, Proposer, ProposerSpec
from specdecode.plugins import hookimpl

if TYPE_CHECKING:
    from specdec_train.recipe import Recipe

    from .config import MtpConfig


@hookimpl
def specdecode_proposers() -> Iterator[ProposerSpec]:
    from .config import MtpConfig
    from .layouts import recognize

    yield ProposerSpec(
        name="mtp",
        summary="the target's own multi-token-prediction layers",
        api=1,
        config=MtpConfig,
        needs=_needs,
        build=_build,
        recognize=recognize,
    )


@hookimpl
def specdecode_recipes() -> Iterator[Recipe]:
    from .recipe import MtpRecipe

    yield MtpRecipe()


def _needs(config: MtpConfig, context: PlanContext) -> Needs:
    from .planning import plan

    return plan(config, context).needs


def _build(config: MtpConfig, context: BuildContext) -> Proposer:
    from .planning import plan
    from .proposer import MtpProposer

    return MtpProposer(plan(config, context))
