"""How a draft model is trained with ``specdecode train draft_model``; only this imports specdec-train."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
from specdec_train.recipe import Boundary, Recipe, Trainee, TrainingTarget
from specdecode.contract import ConfigError, TargetInfo, option, within


@attrs.frozen(kw_only=True)
class DraftTrainingOptions:
    """What the draft model is. Sizes that are not said are the target's, or in its proportions."""

    num_layers: int = option("layers of the draft", default=4, validator=within(1))
    layers: str | None = option(
        "layers of the target that they begin as, as in 0,1,28,29; none: evenly spread, the first and the "
        "last among them",
        default=None,
    )
    hidden_size: int | None = option(
        "a multiple of the target's head_dim; none: the target's", default=None, validator=within(1)
    )
    intermediate_size: int | None = option("of the MLPs", default=None, validator=within(1))
    num_heads: int | None = option("attention heads", default=None, validator=within(1))
    num_kv_heads: int | None = option("key and value heads", default=None, validator=within(1))
    loss_vocab_size: int | None = option(
        "tokens that the loss looks at, the most frequent ones; none: all", default=None, validator=within(1)
    )

    def __attrs_post_init__(self) -> None:
        if self.layers is None:
            return
        parts = [part.strip() for part in self.layers.split(",")]
        if not all(part.isdigit() for part in parts):
            raise ValueError(f"layers must be numbers as in 0,1,28,29, got {self.layers!r}")
        if len(parts) != self.num_layers:
            raise ValueError(f"layers must name num_layers={self.num_layers} of them, got {self.layers!r}")

    def sources(self, target: TargetInfo) -> tuple[int, ...]:
        """Of each layer of the draft, that of the target which it begins as.

        Raises:
            ConfigError: the target has no such layer.
        """
        count = target.num_layers
        if self.layers is None:
            last = max(self.num_layers - 1, 1)
            return tuple(round(index * (count - 1) / last) for index in range(self.num_layers))
        chosen = tuple(int(part) for part in self.layers.split(","))
        if wrong := [layer for layer in chosen if layer >= count]:
            raise ConfigError(f"layers: the target has layers 0 to {count - 1}, got {wrong}")
        return chosen


class DraftModelRecipe(Recipe):
    """Distillation: the target's law of every token of its answers (arXiv 2310.08461, forward KL)."""

    name: ClassVar[str] = "draft_model"
    summary: ClassVar[str] = "a smaller model of the same tokenizer, begun as some of the target's layers"
    options: ClassVar[type] = DraftTrainingOptions
    learning_rate: ClassVar[float] = 6e-4

    def taps(self, options: Any, target: TargetInfo) -> tuple[Boundary, ...]:
        options.sources(target)
        hidden = options.hidden_size or target.hidden_size
        if options.num_heads is None and hidden % target.head_dim:
            raise ConfigError(
                f"hidden_size must be a multiple of the target's head_dim {target.head_dim}, got {hidden}"
            )
        heads = options.num_heads or hidden // target.head_dim
        if options.num_kv_heads is not None and heads % options.num_kv_heads:
            raise ConfigError(
                f"num_kv_heads must divide the {heads} attention heads, got {options.num_kv_heads}"
            )
        return ("final",)

    def build(self, options: Any, target: TrainingTarget) -> Trainee:
        from .recipe_module import DraftTrainee

        return DraftTrainee(options, target)
