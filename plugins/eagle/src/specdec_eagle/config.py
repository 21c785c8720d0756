"""The keys of ``speculative_config`` that belong to these methods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import attrs
from specdecode.contract import MAX_SPECULATIVE_TOKENS, option, within
from specdecode.heads.config import HeadFields, TreeFields

#: Levels of a grown tree that names none: EAGLE-2's one and seven more.
DEFAULT_TREE_DEPTH = 8


def _share(_: Any, __: Any, value: float | None) -> None:
    if value is not None and not 0 < value < 1:
        raise ValueError(f"must be between 0 and 1, both excluded, got {value!r}")


@attrs.frozen(kw_only=True)
class EagleConfig(HeadFields, TreeFields):
    """A chain by default; ``speculative_token_tree`` fixes a tree, ``tree_top_k`` grows one."""

    #: What the checkpoint must be.
    method: ClassVar[Literal["eagle", "eagle3"]] = "eagle"

    num_speculative_tokens: int | None = option(
        f"draft tokens a step, 1 to {MAX_SPECULATIVE_TOKENS}; of a tree: its nodes; none: what a checkpoint "
        "in the speculators format proposes, the nodes of speculative_token_tree, or of a tree that grows as "
        "many as pay on this device, by the time that steps take",
        default=None,
        validator=within(1, MAX_SPECULATIVE_TOKENS),
    )
    tree_top_k: int | None = option(
        "grow a tree as EAGLE-2 does: so many nodes of each level are expanded, by so many children each, "
        "and the best num_speculative_tokens of all are kept",
        default=None,
        validator=within(1, 64),
    )
    tree_depth: int | None = option(
        f"most levels of a grown tree; none: {DEFAULT_TREE_DEPTH}, or as many as nodes if that is less",
        default=None,
        validator=within(1, 64),
    )
    confidence_threshold: float | None = option(
        "a chain ends behind a token at which its confidence, the product of the head's probabilities of its "
        "drafts, has fallen below this; none: never",
        default=None,
        validator=_share,
    )
    rope_parameters: Mapping[str, Any] | None = option(
        "rope_theta, rope_type and what belongs to it, instead of the checkpoint's, where those are wrong",
        default=None,
    )

    def __attrs_post_init__(self) -> None:
        if self.speculative_token_tree is not None and self.tree_top_k is not None:
            raise ValueError(
                "speculative_token_tree and tree_top_k exclude each other: a tree is fixed or grows"
            )
        if self.tree_depth is not None and self.tree_top_k is None:
            raise ValueError("tree_depth has no effect without tree_top_k: it bounds a tree that grows")
        if self.confidence_threshold is not None and (self.speculative_token_tree or self.tree_top_k):
            raise ValueError("confidence_threshold is for chains: a grown tree keeps its best nodes as it is")
        nodes = len(self.topology.parents) if self.topology else None
        if nodes is not None and self.num_speculative_tokens not in (None, nodes):
            raise ValueError(
                f"num_speculative_tokens must be the {nodes} nodes of speculative_token_tree or left out, "
                f"got {self.num_speculative_tokens}"
            )


@attrs.frozen(kw_only=True)
class Eagle3Config(EagleConfig):
    """The same, and which hidden states of the target are read."""

    method: ClassVar[Literal["eagle", "eagle3"]] = "eagle3"

    aux_layer_ids: tuple[int, ...] | None = option(
        "layers of the target whose hidden states the head reads, instead of the checkpoint's", default=None
    )
    aux_layer_convention: Literal["auto", "inputs", "outputs"] = option(
        "what a layer id means: the stream that enters that layer, or the one that leaves it; auto: outputs "
        "where the first id is 1, else inputs",
        default="auto",
    )
