"""What a run is asked for: the options that all recipes share, one class for each stage, and validators."""

from __future__ import annotations

from typing import Any

import attrs
from specdecode.contract import option, within


def _positive(_: Any, __: Any, value: float | None) -> None:
    if value is not None and not value > 0:
        raise ValueError(f"must be above 0, got {value!r}")


def check_decay(_: Any, __: Any, value: float) -> None:
    """Validator of a factor from one draft token's weight to the next one's: above 0, at most 1."""
    if not 0 < value <= 1:
        raise ValueError(f"must be above 0 and at most 1, got {value!r}")


@attrs.frozen(kw_only=True)
class DataOptions:
    """Prompts, answers and states. Runs that agree in these share them (``--work``)."""

    data_tokens: int = option("answer tokens to make", default=1_000_000, validator=within(1))
    data_minutes: float | None = option(
        "most minutes to write answers; what is there then is trained on", default=None, validator=_positive
    )
    prompt_tokens: int = option(
        "longest prompt; longer ones, or beyond the model's context, are left out",
        default=512,
        validator=within(1),
    )
    user_tokens: int = option(
        "longest user's turn that the target writes with --data self", default=160, validator=within(1)
    )
    answer_tokens: int = option("longest answer", default=384, validator=within(1))
    temperatures: str = option(
        "temperatures of the answers, in turn; the held-out ones are greedy", default="0,1"
    )
    held_out: int = option("prompts to hold out for evaluation", default=64, validator=within(1))
    batch_size: int = option("texts that a writer has under way", default=256, validator=within(1))
    writers: int = option(
        "processes that write answers side by side, each with an engine of its own on the device",
        default=1,
        validator=within(1, 16),
    )
    seed: int = option("of prompts, answers, initial weights and order", default=0, validator=within(0))

    @property
    def temperature_list(self) -> tuple[float, ...]:
        return tuple(float(part) for part in self.temperatures.split(","))

    def __attrs_post_init__(self) -> None:
        try:
            good = all(temperature >= 0 for temperature in self.temperature_list)
        except ValueError:
            good = False
        if not good:
            raise ValueError(
                f"temperatures must be numbers of at least 0, as in 0,1; got {self.temperatures!r}"
            )


@attrs.frozen(kw_only=True)
class LoopOptions:
    """The training loop."""

    steps: int | None = option(
        "optimizer steps; none: until --minutes are over", default=None, validator=within(1)
    )
    minutes: float | None = option("most minutes of training", default=None, validator=_positive)
    fresh_states: bool = option(
        "compute the target's states with the batches of the first epoch, and in later ones unless the "
        "device's memory holds them, instead of storing them first: wants no disk and no pass before",
        default=False,
    )
    row_tokens: int = option(
        "tokens of a row, into which texts are packed", default=512, validator=within(16)
    )
    batch_rows: int = option("rows of a batch", default=32, validator=within(1))
    learning_rate: float | None = option("peak; none: the recipe's", default=None, validator=_positive)
    warmup: float = option("share of the steps in which the learning rate rises", default=0.03)
    weight_decay: float = option("of AdamW", default=0.01)
    max_grad_norm: float = option("gradients are scaled down to this norm", default=1.0, validator=_positive)
    save_minutes: float = option("minutes between saved states", default=1.0, validator=_positive)
    evaluate_every: int = option("steps between held-out evaluations", default=200, validator=within(1))

    def __attrs_post_init__(self) -> None:
        if self.steps is None and self.minutes is None:
            raise ValueError("say how long to train: --steps, --minutes, or both")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup must be at least 0 and below 1, got {self.warmup!r}")


@attrs.frozen(kw_only=True)
class PublishOptions:
    """The checkpoint and its gate."""

    weights_dtype: str = option("of the published weights: bfloat16, float16, float32", default="bfloat16")
    shard_mib: int = option("most MiB of a weight file", default=4096, validator=within(1))
    gate_prompts: int = option("held-out prompts of the gate", default=16, validator=within(1))
    gate_tokens: int = option("most tokens of each of their answers", default=128, validator=within(1))
    force: bool = option("publish a method that loses time too", default=False)
    gate: bool = option("reload through the plugin and measure before publishing", default=True)
    conform: bool = option("run the conformance kit on the model itself in the gate", default=True)
    licence: str = option("of the published weights, for the README", default="as the target's")

    def __attrs_post_init__(self) -> None:
        if self.weights_dtype not in ("bfloat16", "float16", "float32"):
            raise ValueError(
                f"weights_dtype must be bfloat16, float16 or float32, got {self.weights_dtype!r}"
            )
