"""What the plugin manager loads; importing it costs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from specdecode.contract import BuildContext, Needs, PlanContext, Proposer, ProposerSpec
from specdecode.plugins import hookimpl

if TYPE_CHECKING:
    from specdec_train.recipe import Recipe

    from .config import MedusaConfig


@hookimpl
def specdecode_proposers() -> Iterator[ProposerSpec]:
    from .config import MedusaConfig
    from .recognition import recognize

    yield ProposerSpec(
        name="medusa",
        summary="Medusa heads: each guesses a token further ahead from the last hidden state",
        api=1,
        config=MedusaConfig,
        needs=_needs,
        build=_build,
        recognize=recognize,
    )


@hookimpl
def specdecode_recipes() -> Iterator[Recipe]:
    from .recipe import MedusaRecipe

    yield MedusaRecipe()


def _needs(config: MedusaConfig, context: PlanContext) -> Needs:
    from .planning import plan

    return plan(config, context).needs


def _build(config: MedusaConfig, context: BuildContext) -> Proposer:
    from .planning import plan
    from .proposer import MedusaProposer

    return MedusaProposer(plan(config, context))
