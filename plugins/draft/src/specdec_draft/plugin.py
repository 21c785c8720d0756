"""What the plugin manager loads; importing it costs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from specdecode.contract import (
    BuildContext,
    CheckpointInfo,
    Match,
    Needs,
    PlanContext,
    Proposer,
    ProposerSpec,
)
from specdecode.plugins import hookimpl

if TYPE_CHECKING:
    from specdec_train.recipe import Recipe

    from .config import DraftModelConfig


@hookimpl
def specdecode_proposers() -> Iterator[ProposerSpec]:
    from .config import DraftModelConfig

    yield ProposerSpec(
        name="draft_model",
        summary="a smaller model of the same tokenizer drafts a chain",
        api=1,
        config=DraftModelConfig,
        needs=_needs,
        build=_build,
        recognize=_recognize,
    )


@hookimpl
def specdecode_recipes() -> Iterator[Recipe]:
    from .recipe import DraftModelRecipe

    yield DraftModelRecipe()


def _needs(config: DraftModelConfig, context: PlanContext) -> Needs:
    from .plan import needs

    return needs(config, context)


def _build(config: DraftModelConfig, context: BuildContext) -> Proposer:
    from .plan import plan
    from .proposer import DraftModelProposer

    return DraftModelProposer(config, plan(config, context))


def _recognize(checkpoint: CheckpointInfo) -> Match | None:
    from .checkpoint import looks_like_a_language_model

    reason = looks_like_a_language_model(checkpoint)
    return None if reason is None else Match(reason)
