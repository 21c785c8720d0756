"""Draft trees over a batch: a fixed topology, and one grown by score.

Legend: ``B`` rows, ``K`` children a node, ``N`` nodes of the tree, ``H`` hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch

from .config import Topology

#: ``expand(level, ids[B, n], hidden[B, n, H], paths[B, n, level]) -> hidden[B, n, H], ids[B, n, K],
#: scores[B, n, K]``: the best children of ``n`` nodes of level ``level`` (1: children of the root).
#: ``paths`` are the scratch entries of each node's ancestors, the last one its own, counted from 0.
Expand = Callable[
    [int, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]
]


@attrs.frozen
class Grown:
    """The nodes of a tree for each row, best first, parent before child."""

    ids: torch.Tensor  #: ``[B, N]`` int64
    parents: torch.Tensor  #: ``[B, N]`` int64, -1 = root
    lens: torch.Tensor  #: ``[B]`` int64: how many nodes there are; the rest is filling


@attrs.frozen(eq=False)
class _Level:
    """Indices of the nodes of one level that have children, and of their children; all int64."""

    inner: torch.Tensor  #: ``[n]`` nodes
    paths: torch.Tensor  #: ``[n, level]`` their ancestors, the last one themselves
    children: torch.Tensor  #: ``[m]`` nodes of the next level
    columns: torch.Tensor  #: ``[m]`` place in ``inner`` of each child's parent
    ranks: torch.Tensor  #: ``[m]``


class FixedTree:
    """A topology with its indices on the device, so that a step copies nothing there."""

    def __init__(self, tree: Topology, device: torch.device) -> None:
        def on_device(values: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        self.fanout = tree.fanout
        self.parents = on_device(tree.parents)
        self.first, self.first_ranks = on_device(tree.at(1)), on_device([tree.ranks[n] for n in tree.at(1)])
        self.levels: list[_Level] = []
        self._depths = on_device(tree.depths)
        for level in range(1, tree.depth):
            inner = [node for node in tree.at(level) if node in tree.parents]
            children = tree.at(level + 1)
            self.levels.append(
                _Level(
                    inner=on_device(inner),
                    paths=on_device([tree.path(node) for node in inner]),
                    children=on_device(children),
                    columns=on_device([inner.index(tree.parents[node]) for node in children]),
                    ranks=on_device([tree.ranks[node] for node in children]),
                )
            )

    def __len__(self) -> int:
        return len(self.parents)

    def lens_within(self, room: torch.Tensor) -> torch.Tensor:
        """``[B]``: how many nodes lie within ``room`` levels; they come first."""
        return (self._depths[None] <= room[:, None]).sum(-1)


def fill(tree: FixedTree, expand: Expand, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Token ids ``[B, N]`` of the nodes of a fixed tree.

    Args:
        expand: called for each level that has children; scratch entry ``i`` belongs to node ``i``.
        ids: ``[B, K]`` int64, the root's best children.
        hidden: ``[B, H]``, the root's hidden state.
    """
    batch = ids.shape[0]
    filled = torch.zeros(batch, len(tree), dtype=torch.int64, device=ids.device)
    states = torch.zeros(batch, len(tree), hidden.shape[-1], dtype=hidden.dtype, device=hidden.device)
    filled[:, tree.first] = ids[:, tree.first_ranks]
    states[:, tree.first] = hidden[:, None].expand(-1, len(tree.first), -1)
    for level, at in enumerate(tree.levels, 1):
        grown, children, _ = expand(
            level, filled[:, at.inner], states[:, at.inner], at.paths[None].expand(batch, -1, -1)
        )
        filled[:, at.children] = children[:, at.columns, at.ranks]
        states[:, at.children] = grown[:, at.columns]
    return filled


def grow(
    expand: Expand,
    ids: torch.Tensor,
    scores: torch.Tensor,
    hidden: torch.Tensor,
    *,
    depth: int,
    width: int,
    room: torch.Tensor,
) -> Grown:
    """Grow the tree of EAGLE-2 (arXiv 2406.16858): expand each level's best K nodes, keep the best of all.

    A node's score is the sum of its path's; a child never scores above its parent, and of equals the
    older comes first, so the best ``width`` nodes are closed under parents.

    Args:
        expand: called for the K best nodes of each level; scratch entry ``(level - 1) * K + j``
            belongs to the ``j``-th of them.
        ids: ``[B, K]`` int64, the root's best children.
        scores: ``[B, K]`` float32, theirs.
        hidden: ``[B, H]``, the root's hidden state.
        depth: most levels.
        width: most nodes.
        room: ``[B]`` int64, most levels of each row.
    """
    batch, fanout = ids.shape
    total = _relative(scores)
    levels = [torch.ones_like(ids)]
    all_ids, all_scores, all_parents = [ids], [total], [torch.full_like(ids, -1)]
    slot = torch.arange(fanout, device=ids.device).expand(batch, -1)
    nodes, states, paths = slot, hidden[:, None].expand(-1, fanout, -1), slot[..., None]
    for level in range(1, depth):
        grown, children, scores = expand(level, ids, states, paths)
        candidates = (total[..., None] + _relative(scores)).flatten(1)
        start = fanout + (level - 1) * fanout * fanout
        all_ids.append(children.flatten(1))
        all_scores.append(candidates)
        all_parents.append(nodes.repeat_interleave(fanout, dim=1))
        levels.append(torch.full_like(all_parents[-1], level + 1))

        total, chosen = _best(candidates, fanout)
        ids, nodes = all_ids[-1].gather(1, chosen), start + chosen
        parent = chosen // fanout
        states = grown.gather(1, parent[..., None].expand(-1, -1, grown.shape[-1]))
        above = paths.gather(1, parent[..., None].expand(-1, -1, level))
        paths = torch.cat((above, (level * fanout + slot)[..., None]), dim=-1)
    return _select(
        torch.cat(all_ids, 1),
        torch.cat(all_parents, 1),
        torch.cat(all_scores, 1).masked_fill(torch.cat(levels, 1) > room[:, None], -torch.inf),
        width,
    )


def _select(ids: torch.Tensor, parents: torch.Tensor, scores: torch.Tensor, width: int) -> Grown:
    """The best ``width`` nodes, their parents renumbered."""
    count = ids.shape[1]
    best, order = _best(scores, count)
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(count, device=ids.device).expand_as(order))
    above = parents.gather(1, order[:, :width])
    return Grown(
        ids=ids.gather(1, order[:, :width]),
        parents=torch.where(above < 0, -1, rank.gather(1, above.clamp(min=0))),
        lens=(best[:, :width] > -torch.inf).sum(1),
    )


def _best(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` best of each row, the earlier of equals first."""
    values, order = torch.sort(scores, dim=1, descending=True, stable=True)
    return values[:, :count], order[:, :count]


def _relative(scores: torch.Tensor) -> torch.Tensor:
    """Scores of siblings against each other, none above 0; -inf where a token cannot be drawn."""
    return torch.nan_to_num(scores.log_softmax(-1), nan=-torch.inf, neginf=-torch.inf)
