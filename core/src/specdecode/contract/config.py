"""Configuration keys that several methods share, spelt and documented once.

A method's config class is a frozen, keyword-only attrs class. Each field carries its
documentation in ``metadata["doc"]`` (see :func:`option`); validators raise ``ValueError`` with a
message of the form "must be ..., got ...". Core adds the field's path in front.
"""

from __future__ import annotations

from typing import Any, Literal

import attrs

#: Most draft tokens a step that any method may ask for.
MAX_SPECULATIVE_TOKENS = 1024


def option(doc: str, *, default: Any = attrs.NOTHING, validator: Any = None) -> Any:
    """A documented field of a method's config class."""
    return attrs.field(default=default, validator=validator, metadata={"doc": doc}, kw_only=True)


def within(low: int, high: int | None = None) -> Any:
    """Validator: ``low <= value <= high``; None passes."""

    def check(_: Any, attribute: Any, value: int | None) -> None:
        if value is None:
            return
        if value < low or (high is not None and value > high):
            bounds = f"at least {low}" if high is None else f"between {low} and {high}"
            raise ValueError(f"must be {bounds}, got {value!r}")

    return check


@attrs.frozen(kw_only=True, slots=False)  # two slotted mixins could not be combined
class LengthFields:
    """``num_speculative_tokens``, for methods whose checkpoint does not say it."""

    num_speculative_tokens: int = option(
        f"draft tokens proposed a step, 1 to {MAX_SPECULATIVE_TOKENS}",
        validator=within(1, MAX_SPECULATIVE_TOKENS),
    )


@attrs.frozen(kw_only=True, slots=False)
class DraftModelFields:
    """Keys of methods that load a draft checkpoint."""

    model: str = option("path or hub id of the draft checkpoint")
    revision: str | None = option("revision of the draft checkpoint", default=None)
    quantization: str | None = option(
        "quantization of the draft's weights; none: the checkpoint's own", default=None
    )
    dtype: str | None = option("dtype of the draft's weights; none: the target's", default=None)
    max_model_len: int | None = option(
        "longest context the draft works on; none: the smaller of its own and the target's",
        default=None,
        validator=within(1),
    )
    draft_tensor_parallel_size: int | None = option(
        "ranks of the draft: 1 or the target's; none: the faster", default=None, validator=within(1)
    )
    draft_sample_method: Literal["greedy", "probabilistic"] = option(
        "whether a sampled request's drafts are the draft's best token or drawn with the target's noise",
        default="probabilistic",
    )
