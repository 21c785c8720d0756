"""What the plugin manager loads; importing it costs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from specdecode.contract import BuildContext, Needs, PlanContext, Proposer, ProposerSpec
from specdecode.plugins import hookimpl

if TYPE_CHECKING:
    from specdec_train.recipe import Recipe

    from .config import EagleConfig


@hookimpl
def specdecode_proposers() -> Iterator[ProposerSpec]:
    from .config import Eagle3Config, EagleConfig
    from .recognition import recognize_eagle, recognize_eagle3

    yield ProposerSpec(
        name="eagle",
        summary="EAGLE and EAGLE-2 heads: a layer on the target's last hidden state",
        api=1,
        config=EagleConfig,
        needs=_needs,
        build=_build,
        recognize=recognize_eagle,
    )
    yield ProposerSpec(
        name="eagle3",
        summary="EAGLE-3 heads: a layer on hidden states of several depths of the target",
        api=1,
        config=Eagle3Config,
        needs=_needs,
        build=_build,
        recognize=recognize_eagle3,
    )


@hookimpl
def specdecode_recipes() -> Iterator[Recipe]:
    from .recipe import Eagle3Recipe, EagleRecipe

    yield EagleRecipe()
    yield Eagle3Recipe()


def _needs(config: EagleConfig, context: PlanContext) -> Needs:
    from .planning import plan

    return plan(config, context).needs


def _build(config: EagleConfig, context: BuildContext) -> Proposer:
    from .planning import plan
    from .proposer import EagleProposer

    return EagleProposer(plan(config, context))
