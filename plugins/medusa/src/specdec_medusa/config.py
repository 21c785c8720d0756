"""The keys of ``speculative_config`` that belong to this method."""

from __future__ import annotations

from typing import Any

import attrs
from specdecode.contract import MAX_SPECULATIVE_TOKENS, option, within
from specdecode.heads.config import HeadFields
from specdecode.heads.topology import parse_tree

from .choices import PUBLISHED

#: Value of ``speculative_token_tree`` that asks for a chain.
CHAIN = "chain"


def _tree(_: Any, __: Any, value: Any) -> None:
    if value is None or value == CHAIN or (isinstance(value, str) and value in PUBLISHED):
        return
    try:
        parse_tree(value)
    except ValueError as error:
        known = ", ".join(map(repr, (CHAIN, *PUBLISHED)))
        raise ValueError(f"{error}; or it names one of {known}") from None


@attrs.frozen(kw_only=True)
class MedusaConfig(HeadFields):
    """The tree that the checkpoint proposes, else a chain; ``speculative_token_tree`` says otherwise."""

    model: str | None = option(  # type: ignore[assignment]  # the target itself may hold them
        "path or hub id of the heads' checkpoint; none: they are in the target's own (Medusa-2)", default=None
    )
    num_speculative_tokens: int | None = option(
        f"draft tokens a step, 1 to {MAX_SPECULATIVE_TOKENS}; of a tree: its nodes, the best first; none: as "
        "many as there are heads, or nodes of the tree",
        default=None,
        validator=within(1, MAX_SPECULATIVE_TOKENS),
    )
    speculative_token_tree: str | tuple[tuple[int, ...], ...] | None = option(
        "a tree: for each node the ranks that lead to it from the root, as a list, or a string of one: "
        f"[(0,), (1,), (0, 0)]; or the name of a published one: {', '.join(PUBLISHED)}; or {CHAIN}; none: "
        "the checkpoint's medusa_choices, else a chain",
        default=None,
        validator=_tree,
    )

    def __attrs_post_init__(self) -> None:
        tree = self.speculative_token_tree
        if tree is None or tree == CHAIN or tree in PUBLISHED:
            return
        nodes = len(parse_tree(tree))
        if self.num_speculative_tokens not in (None, nodes):
            raise ValueError(
                f"num_speculative_tokens must be the {nodes} nodes of speculative_token_tree or left out, "
                f"got {self.num_speculative_tokens}"
            )
