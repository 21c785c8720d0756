"""What the plugin manager loads; importing it costs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from specdecode.contract import BuildContext, Needs, PlanContext, Proposer, ProposerSpec
from specdecode.plugins import hookimpl

if TYPE_CHECKING:
    from specdec_train.recipe import Recipe

    from .config import MlpSpeculatorConfig


@hookimpl
def specdecode_proposers() -> Iterator[ProposerSpec]:
    from .config import MlpSpeculatorConfig
    from .recognition import recognize

    yield ProposerSpec(
        name="mlp_speculator",
        summary="MLP speculators: a recurrent MLP on the last hidden state",
        api=1,
        config=MlpSpeculatorConfig,
        needs=_needs,
        build=_build,
        recognize=recognize,
    )


@hookimpl
def specdecode_recipes() -> Iterator[Recipe]:
    from .recipe import MlpSpeculatorRecipe

    yield MlpSpeculatorRecipe()


def _needs(config: MlpSpeculatorConfig, context: PlanContext) -> Needs:
    from .planning import plan

    return plan(config, context).needs


def _build(config: MlpSpeculatorConfig, context: BuildContext) -> Proposer:
    from .planning import plan
    from .proposer import MlpSpeculatorProposer

    return MlpSpeculatorProposer(plan(config, context))
