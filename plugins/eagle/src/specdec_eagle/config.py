"""The keys of ``speculative_config`` that belong to these methods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import attrs
from specdecode.contract import MAX_SPECULATIVE_TOKENS, DraftModelFields, option, within

from .topology import Topology, parse_tree

#: Levels of a grown tree that names none: EAGLE-2's one and seven more.
DEFAULT_TREE_DEPTH = 8


def _tree(_: Any, __: Any, value: Any) -> None:
    if value is not None:
        parse_tree(value)


def _only(works: Any, instead: str) -> Any:
    def check(_: Any, __: Any, value: Any) -> None:
        if value not in (None, works):
            raise ValueError(f"must be {works!r} or left out in this version, got {value!r}: {instead}")

    return check


def _share(_: Any, __: Any, value: float | None) -> None:
    if value is not None and not 0 < value < 1:
        raise ValueError(f"must be between 0 and 1, both excluded, got {value!r}")


@attrs.frozen(kw_only=True)
class EagleConfig(DraftModelFields):
    """A chain by default; ``speculative_token_tree`` fixes a tree, ``tree_top_k`` grows one."""

    #: What the checkpoint must be.
    method: ClassVar[Literal["eagle", "eagle3"]] = "eagle"

    quantization: str | None = option(
        "must be left out: a head computes in the target's dtype",
        default=None,
        validator=_only(None, "the head's weights are not quantized"),
    )
    draft_tensor_parallel_size: int | None = option(
        "must be 1: a head is computed on one device",
        default=None,
        validator=_only(1, "a head is too small to be worth sharding"),
    )
    num_speculative_tokens: int | None = option(
        f"draft tokens a step, 1 to {MAX_SPECULATIVE_TOKENS}; of a tree: its nodes; none: what a checkpoint "
        "in the speculators format proposes, or the nodes of speculative_token_tree",
        default=None,
        validator=within(1, MAX_SPECULATIVE_TOKENS),
    )
    speculative_token_tree: str | tuple[tuple[int, ...], ...] | None = option(
        "a fixed tree: for each node the ranks that lead to it from the root, as a list, or a string of one: "
        "[(0,), (1,), (0, 0)]",
        default=None,
        validator=_tree,
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

    @property
    def topology(self) -> Topology | None:
        """The fixed tree, if one is asked for."""
        tree = self.speculative_token_tree
        return None if tree is None else Topology.from_paths(parse_tree(tree))


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
