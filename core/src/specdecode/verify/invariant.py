"""The invariant rule: the output is what plain decoding draws, whatever the drafts are.

The target draws its token at every node with noise keyed by seed, completion index, position and
token id (:mod:`specdecode.sampling`). A draft is accepted while it equals the token so drawn, so
that drafts decide how many tokens a step gives and never which.
"""

from __future__ import annotations

from collections.abc import Sequence

from .base import Verdict


def walk(targets: Sequence[int], ids: Sequence[int], parents: Sequence[int]) -> Verdict:
    """Walk down a chain or tree of drafts along the tokens the target drew.

    Args:
        targets: the target's token at the root, then after each node: one more than there are nodes.
        ids: the token of each node.
        parents: the index of each node's parent, -1 = the root; a parent comes before its children.
            Of siblings with one token the first wins, and with it its subtree.

    Returns:
        The accepted nodes, their tokens, and the target's token after the last of them.
    """
    if len(targets) != len(ids) + 1 or len(parents) != len(ids):
        raise ValueError(
            f"{len(ids)} drafts want {len(ids) + 1} targets and {len(ids)} parents, "
            f"got {len(targets)} and {len(parents)}"
        )
    accepted: list[int] = []
    node, token = -1, targets[0]
    # One pass is enough: children come after their parent, so none of them has been passed yet.
    for i, (draft, parent) in enumerate(zip(ids, parents, strict=True)):
        if parent == node and draft == token:
            accepted.append(i)
            node, token = i, targets[i + 1]
    return Verdict(tuple(accepted), (*(int(ids[i]) for i in accepted), int(token)))
