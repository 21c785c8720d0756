"""The keys of ``speculative_config`` that belong to this method."""

from __future__ import annotations

import attrs
from specdecode.contract import MAX_SPECULATIVE_TOKENS, option, within
from specdecode.heads.config import HeadFields, TreeFields


@attrs.frozen(kw_only=True)
class MlpSpeculatorConfig(HeadFields, TreeFields):
    """A chain by default; ``speculative_token_tree`` fixes a tree, ``tree_top_k`` grows one."""

    num_speculative_tokens: int | None = option(
        f"draft tokens a step, 1 to {MAX_SPECULATIVE_TOKENS}; of a tree: its nodes; none: the checkpoint's "
        "n_predict, or the nodes of speculative_token_tree",
        default=None,
        validator=within(1, MAX_SPECULATIVE_TOKENS),
    )
    tree_top_k: int | None = option(
        "grow a tree: so many nodes of each level are expanded, by so many children each, and the best "
        "num_speculative_tokens of all are kept",
        default=None,
        validator=within(1, 64),
    )

    def __attrs_post_init__(self) -> None:
        if self.speculative_token_tree is not None and self.tree_top_k is not None:
            raise ValueError(
                "speculative_token_tree and tree_top_k exclude each other: a tree is fixed or grows"
            )
        nodes = len(self.topology) if self.topology else None
        if nodes is not None and self.num_speculative_tokens not in (None, nodes):
            raise ValueError(
                f"num_speculative_tokens must be the {nodes} nodes of speculative_token_tree or left out, "
                f"got {self.num_speculative_tokens}"
            )
