"""Which nodes of a row's drafts are in order. Without torch: replays of recorded texts go by it too."""

from __future__ import annotations

from collections.abc import Sequence

import attrs


@attrs.frozen
class Taken:
    """Nodes of one row that are in order: where they stand in the buffers, ids and parents."""

    nodes: list[int] = attrs.Factory(list)
    ids: list[int] = attrs.Factory(list)
    parents: list[int] = attrs.Factory(list)


def in_order(
    ids: Sequence[int], parents: Sequence[int], room: int, vocab_size: int, *, chain: bool
) -> tuple[Taken, int]:
    """The nodes of a row up to its first bad one, without those too deep; and how many were bad."""
    taken = Taken()
    place = {-1: -1}
    depth = {-1: 0}
    for node, (token, parent) in enumerate(zip(ids, parents, strict=True)):
        ordered = parent == node - 1 if chain else -1 <= parent < node
        if not (0 <= token < vocab_size and ordered):
            return taken, len(ids) - node
        depth[node] = depth[parent] + 1
        if depth[node] <= room and parent in place:
            place[node] = len(taken.nodes)
            taken.nodes.append(node)
            taken.ids.append(token)
            taken.parents.append(place[parent])
    return taken, 0
