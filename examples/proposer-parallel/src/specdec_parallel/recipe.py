"""How a drafter is trained: ``specdecode train parallel``. This and ``trainee`` alone need specdec-train."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import attrs
from specdec_train.options import check_decay
from specdec_train.recipe import Boundary, Recipe, Trainee, TrainingTarget
from specdecode.contract import TargetInfo, option, within


@attrs.frozen(kw_only=True)
class ParallelTrainingOptions:
    """Sizes of the drafter, and what its loss looks at."""

    num_draft_tokens: int = option("tokens of a draft", default=4, validator=within(1, 16))
    hidden_size: int = option("of the drafter's own stream", default=192, validator=within(2))
    intermediate_size: int = option("of its MLPs", default=256, validator=within(1))
    num_layers: int = option("decoder layers", default=2, validator=within(1, 16))
    num_heads: int = option("of attention; they share the hidden size", default=3, validator=within(1))
    decay: float = option(
        "weight of each place's loss by that of the one before", default=0.8, validator=check_decay
    )
    loss_vocab_size: int | None = option(
        "tokens that the loss looks at, the most frequent ones; none: all", default=None, validator=within(1)
    )

    def __attrs_post_init__(self) -> None:
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"hidden_size must be a multiple of twice num_heads ({2 * self.num_heads}), "
                f"got {self.hidden_size}"
            )


class ParallelRecipe(Recipe):
    """Cross entropy of each place's law against the target's, all places of a draft in one pass."""

    name: ClassVar[str] = "parallel"
    summary: ClassVar[str] = "A drafter that gives all its tokens in one pass"
    options: ClassVar[type] = ParallelTrainingOptions
    depth: ClassVar[int] = 4

    def taps(self, options: Any, target: TargetInfo) -> tuple[Boundary, ...]:
        return round(2 * target.num_layers / 3), "final"

    def build(self, options: Any, target: TrainingTarget) -> Trainee:
        from .trainee import ParallelTrainee

        return ParallelTrainee(options, target, self.taps(options, target.info))

    def speculative_config(self, options: Any, path: Path) -> dict[str, Any]:
        return {"method": self.name, "model": str(path)}  # as many tokens as it was trained for
