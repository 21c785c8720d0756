"""How heads are trained with ``specdecode train medusa``; only this imports specdec-train."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import attrs
from specdec_train.options import check_decay
from specdec_train.recipe import Boundary, Recipe, Trainee, TrainingTarget
from specdecode.contract import MAX_SPECULATIVE_TOKENS, TargetInfo, option, within


@attrs.frozen(kw_only=True)
class MedusaTrainingOptions:
    """Medusa-1: the target stays as it is, and its output layer serves all heads."""

    num_heads: int = option("heads, one for each draft token of a chain", default=5, validator=within(1, 16))
    num_layers: int = option("residual layers of each head", default=1, validator=within(1, 4))
    decay: float = option(
        "weight of each head's loss by that of the one before", default=0.8, validator=check_decay
    )
    loss_vocab_size: int | None = option(
        "tokens that the loss looks at, the most frequent ones; none: all", default=None, validator=within(1)
    )
    search_tree: int | None = option(
        "nodes of a tree, searched for by how often each rank of each head was right on held-out text, that "
        "the checkpoint is to propose; none: it proposes a chain",
        default=None,
        validator=within(1, MAX_SPECULATIVE_TOKENS),
    )


class MedusaRecipe(Recipe):
    """Cross entropy of each head against the target's law so many tokens ahead (arXiv 2401.10774)."""

    name: ClassVar[str] = "medusa"
    summary: ClassVar[str] = "Medusa heads: each guesses a token further ahead"
    options: ClassVar[type] = MedusaTrainingOptions

    def taps(self, options: Any, target: TargetInfo) -> tuple[Boundary, ...]:
        return ("final",)

    def build(self, options: Any, target: TrainingTarget) -> Trainee:
        from .recipe_modules import MedusaTrainee

        return MedusaTrainee(options, target)

    def speculative_config(self, options: Any, path: Path) -> dict[str, Any]:
        return {"method": self.name, "model": str(path)}  # its tree, or a chain of all heads
