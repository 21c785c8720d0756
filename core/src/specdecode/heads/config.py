"""Keys of ``speculative_config`` that methods with heads share, and the refusals they have in common."""

from __future__ import annotations

from typing import Any

import attrs

from ..contract import ConfigError, DraftModelFields, PlanContext, option
from .topology import Topology, parse_tree


def only(works: Any, instead: str) -> Any:
    """Validator: ``works`` or None, all else is refused with the reason ``instead``."""

    def check(_: Any, __: Any, value: Any) -> None:
        if value not in (None, works):
            raise ValueError(f"must be {works!r} or left out in this version, got {value!r}: {instead}")

    return check


def check_tree(_: Any, __: Any, value: Any) -> None:
    """Validator of ``speculative_token_tree``."""
    if value is not None:
        parse_tree(value)


@attrs.frozen(kw_only=True, slots=False)
class HeadFields(DraftModelFields):
    """A checkpoint of heads that compute on the target's hidden states, in its dtype, whole on every rank."""

    quantization: str | None = option(
        "must be left out: a head computes in the target's dtype",
        default=None,
        validator=only(None, "the head's weights are not quantized"),
    )
    draft_tensor_parallel_size: int | None = option(
        "must be 1: a head is computed whole, by every rank of the target",
        default=None,
        validator=only(1, "a head is too small to be worth sharding"),
    )


@attrs.frozen(kw_only=True, slots=False)
class TreeFields:
    """``speculative_token_tree``."""

    speculative_token_tree: str | tuple[tuple[int, ...], ...] | None = option(
        "a fixed tree: for each node the ranks that lead to it from the root, as a list, or a string of one: "
        "[(0,), (1,), (0, 0)]",
        default=None,
        validator=check_tree,
    )

    @property
    def topology(self) -> Topology | None:
        """The fixed tree, if one is asked for."""
        tree = self.speculative_token_tree
        return None if tree is None else Topology.from_paths(parse_tree(tree))


def check_dtype(config: HeadFields, context: PlanContext) -> None:
    """Refuse a ``dtype`` that is not the target's, with a ConfigError."""
    target = context.target
    if config.dtype not in (None, target.dtype):
        raise ConfigError(
            f"speculative_config.dtype must be the target's {target.dtype!r} or left out, got "
            f"{config.dtype!r}: a head computes on the target's hidden states"
        )
