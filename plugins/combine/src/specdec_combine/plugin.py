"""What the plugin manager loads; importing it costs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from specdecode.contract import BuildContext, Needs, PlanContext, Proposer, ProposerSpec
from specdecode.plugins import hookimpl

if TYPE_CHECKING:
    from .config import AutoConfig, CascadeConfig, ExtendConfig


@hookimpl
def specdecode_proposers() -> Iterator[ProposerSpec]:
    from .config import AutoConfig, CascadeConfig, ExtendConfig

    yield ProposerSpec(
        name="cascade",
        summary="of several methods the first whose score is high enough drafts, row by row",
        api=1,
        config=CascadeConfig,
        needs=_cascade_needs,
        build=_cascade,
    )
    yield ProposerSpec(
        name="extend",
        summary="a method drafts, and a lookup goes on from its drafts",
        api=1,
        config=ExtendConfig,
        needs=_extend_needs,
        build=_extend,
    )
    yield ProposerSpec(
        name="auto",
        summary="learns which of several methods, or none, pays for each namespace and load",
        api=1,
        config=AutoConfig,
        needs=_auto_needs,
        build=_auto,
    )


def _cascade_needs(config: CascadeConfig, context: PlanContext) -> Needs:
    from .planning import cascade_needs

    return cascade_needs(config, context)


def _cascade(config: CascadeConfig, context: BuildContext) -> Proposer:
    from .cascade import CascadeProposer
    from .planning import Choice
    from .team import Team

    return CascadeProposer(Team.of(Choice.of(config.proposers), context), config.min_score)


def _extend_needs(config: ExtendConfig, context: PlanContext) -> Needs:
    from .planning import extend_needs

    return extend_needs(config, context)


def _extend(config: ExtendConfig, context: BuildContext) -> Proposer:
    from .extend import ExtendProposer
    from .planning import Choice
    from .team import Team

    return ExtendProposer(Team.of(Choice.of(config.proposers), context))


def _auto_needs(config: AutoConfig, context: PlanContext) -> Needs:
    from .planning import auto_needs

    return auto_needs(config, context)


def _auto(config: AutoConfig, context: BuildContext) -> Proposer:
    from .auto import AutoProposer
    from .learning import Learner
    from .planning import candidates
    from .team import Team

    choices = candidates(config, context)
    learner = Learner(len(choices), trial_steps=config.trial_steps, exploration=config.exploration)
    return AutoProposer(Team.of(choices, context), learner)
