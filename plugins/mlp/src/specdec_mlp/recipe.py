"""How speculators are trained with ``specdecode train mlp_speculator``; only this imports specdec-train."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import attrs
from specdec_train.options import check_decay
from specdec_train.recipe import Boundary, Recipe, Trainee, TrainingTarget
from specdecode.contract import TargetInfo, option, within


@attrs.frozen(kw_only=True)
class MlpSpeculatorTrainingOptions:
    """A speculator with tied weights."""

    n_predict: int = option("steps, one for each draft token of a chain", default=4, validator=within(1, 16))
    inner_dim: int | None = option(
        "width of the state, of embeddings and of the output layer; none: the target's hidden size",
        default=None,
        validator=within(1),
    )
    scale_input: bool = option("norm the target's state before the first step", default=True)
    decay: float = option(
        "weight of each step's loss by that of the one before", default=0.8, validator=check_decay
    )


class MlpSpeculatorRecipe(Recipe):
    """Cross entropy of each step against the law of the target, whose text feeds it (arXiv 2404.19124)."""

    name: ClassVar[str] = "mlp_speculator"
    summary: ClassVar[str] = "an MLP speculator: a small recurrent network on the target's last hidden state"
    options: ClassVar[type] = MlpSpeculatorTrainingOptions

    def taps(self, options: Any, target: TargetInfo) -> tuple[Boundary, ...]:
        return ("final",)

    def build(self, options: Any, target: TrainingTarget) -> Trainee:
        from .recipe_modules import MlpSpeculatorTrainee

        return MlpSpeculatorTrainee(options, target)

    def speculative_config(self, options: Any, path: Path) -> dict[str, Any]:
        return {"method": self.name, "model": str(path)}  # n_predict decides
