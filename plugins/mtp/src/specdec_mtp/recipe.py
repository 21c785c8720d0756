"""How a module is trained with ``specdecode train mtp``; specdec-train is imported in recipes alone."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
from specdec_train.options import check_decay
from specdec_train.recipe import Boundary, Recipe, Trainee, TrainingTarget
from specdecode.contract import ConfigError, TargetInfo, option, within


@attrs.frozen(kw_only=True)
class MtpTrainingOptions:
    """What the module can be, and how it is taught."""

    intermediate_size: int | None = option(
        "of the module's MLP; none: the target's", default=None, validator=within(1)
    )
    unrolled: int = option(
        "passes of a draft that training unrolls, each fed with what the one before made",
        default=4,
        validator=within(1, 16),
    )
    decay: float = option("weight of each pass by that of the one before", default=0.8, validator=check_decay)
    loss_vocab_size: int | None = option(
        "tokens that the loss looks at, the most frequent ones; none: all", default=None, validator=within(1)
    )


class MtpRecipe(Recipe):
    """One module in MiMo's layout, applied to its own output: unrolled, as EAGLE heads are by HASS."""

    name: ClassVar[str] = "mtp"
    summary: ClassVar[str] = "a multi-token-prediction layer for a target that was published without one"
    options: ClassVar[type] = MtpTrainingOptions
    depth: ClassVar[int] = 4

    def taps(self, options: Any, target: TargetInfo) -> tuple[Boundary, ...]:
        if not target.native:
            raise ConfigError(
                f"a multi-token-prediction layer is trained for targets of the native families, got "
                f"{target.architecture!r}"
            )
        return ("final",)

    def build(self, options: Any, target: TrainingTarget) -> Trainee:
        from .recipe_module import MtpTrainee

        return MtpTrainee(options, target)
