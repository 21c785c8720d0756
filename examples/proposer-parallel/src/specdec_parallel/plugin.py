"""What the plugin manager loads; importing it costs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from specdecode.contract import BuildContext, Needs, PlanContext, Proposer, ProposerSpec
from specdecode.plugins import hookimpl

if TYPE_CHECKING:
    from specdec_train.recipe import Recipe

    from .config import ParallelConfig


@hookimpl
def specdecode_proposers() -> Iterator[ProposerSpec]:
    from .checkpoint import recognize
    from .config import ParallelConfig

    yield ProposerSpec(
        name="parallel",
        summary="drafts all tokens in one pass with a trained drafter (P-EAGLE, DFlash)",
        api=1,
        config=ParallelConfig,
        needs=_needs,
        build=_build,
        recognize=recognize,
    )


@hookimpl
def specdecode_recipes() -> Iterator[Recipe]:
    from .recipe import ParallelRecipe  # specdec-train is imported here, where it is there

    yield ParallelRecipe()


def _needs(config: ParallelConfig, context: PlanContext) -> Needs:
    from .planning import plan

    return plan(config, context).needs


def _build(config: ParallelConfig, context: BuildContext) -> Proposer:
    from .planning import plan
    from .proposer import ParallelProposer  # heavy modules are imported here, on use

    return ParallelProposer(plan(config, context))
