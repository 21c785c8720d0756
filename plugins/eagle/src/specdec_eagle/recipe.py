"""How heads are trained with ``specdecode train eagle`` and ``eagle3``; only this imports specdec-train."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
from specdec_train.options import check_decay
from specdec_train.recipe import Boundary, Recipe, Trainee, TrainingTarget
from specdecode.contract import ConfigError, TargetInfo, option, within


@attrs.frozen(kw_only=True)
class EagleOptions:
    """What both kinds of heads can be, and how they are taught."""

    intermediate_size: int | None = option("of the head's MLP; none: the target's", default=None)
    num_heads: int | None = option("of the head's attention; none: the target's", default=None)
    num_kv_heads: int | None = option("key and value heads; none: the target's", default=None)
    unrolled: int = option(
        "passes of a draft that training unrolls, each fed with what the one before made",
        default=5,
        validator=within(1, 16),
    )
    decay: float = option("weight of each pass by that of the one before", default=0.8, validator=check_decay)


@attrs.frozen(kw_only=True)
class EagleTrainingOptions(EagleOptions):
    """EAGLE and HASS."""

    loss_vocab_size: int | None = option(
        "tokens that the loss looks at, the most frequent ones; none: all",
        default=None,
        validator=within(1),
    )
    feature_weight: float = option(
        "weight of the distance to the target's hidden state, beside that of the law's cross entropy",
        default=0.2,
    )


@attrs.frozen(kw_only=True)
class Eagle3TrainingOptions(EagleOptions):
    """EAGLE-3."""

    draft_vocab_size: int | None = option(
        "tokens that can be drafted, those that the target writes most; none: all",
        default=None,
        validator=within(1),
    )
    aux_layer_ids: str | None = option(
        "layers of the target whose inputs are read, as in 2,15,27; none: 2, L // 2 and L - 3", default=None
    )
    own_head: bool = option(
        "train an output layer, which begins as the target's; without: the target's rows are used and none "
        "are stored",
        default=True,
    )
    fc_norm: bool = option("norm each hidden state before they are joined (EAGLE-3.1)", default=False)
    norm_before_residual: bool = option("what the first norm gives is the residual stream", default=False)

    def __attrs_post_init__(self) -> None:
        if self.aux_layer_ids is not None and not all(
            part.strip().isdigit() for part in self.aux_layer_ids.split(",")
        ):
            raise ValueError(f"aux_layer_ids must be numbers as in 2,15,27, got {self.aux_layer_ids!r}")

    def boundaries(self, target: TargetInfo) -> tuple[int, ...]:
        """Of the target, in the order in which they are joined."""
        count = target.num_layers
        if self.aux_layer_ids is None:
            return (2, count // 2, count - 3)
        ids = tuple(int(part) for part in self.aux_layer_ids.split(","))
        if ids[0] == 1:
            raise ConfigError(
                "aux_layer_ids must not begin with 1: readers would take all ids for outputs of layers"
            )
        return ids


class EagleRecipe(Recipe):
    """EAGLE: smooth L1 on features and cross entropy through the target's own head, unrolled as in HASS."""

    name: ClassVar[str] = "eagle"
    summary: ClassVar[str] = "an EAGLE head: a layer on the target's last hidden state"
    options: ClassVar[type] = EagleTrainingOptions

    def taps(self, options: Any, target: TargetInfo) -> tuple[Boundary, ...]:
        return ("final",)

    def build(self, options: Any, target: TrainingTarget) -> Trainee:
        from .recipe_modules import EagleTrainee

        return EagleTrainee(options, target)


class Eagle3Recipe(Recipe):
    """EAGLE-3 with its training-time test (arXiv 2503.01840)."""

    name: ClassVar[str] = "eagle3"
    summary: ClassVar[str] = "an EAGLE-3 head: a layer on hidden states of several depths of the target"
    options: ClassVar[type] = Eagle3TrainingOptions

    def taps(self, options: Any, target: TargetInfo) -> tuple[Boundary, ...]:
        boundaries = options.boundaries(target)
        if wrong := [b for b in boundaries if not 0 <= b <= target.num_layers]:
            raise ConfigError(
                f"aux_layer_ids: the target has layers 0 to {target.num_layers - 1}, got {wrong}; with fewer "
                "than 6 layers say which"
            )
        return (*dict.fromkeys(boundaries), "final")

    def build(self, options: Any, target: TrainingTarget) -> Trainee:
        from .recipe_modules import Eagle3Trainee

        return Eagle3Trainee(options, target)
