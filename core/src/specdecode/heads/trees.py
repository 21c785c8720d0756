"""Draft trees over a batch: a fixed topology, and one that grows by confidence (EAGLE-2, arXiv 2406.16858).

Legend: ``B`` rows, ``K`` children a node, ``N`` nodes of the tree, ``H`` hidden size. All is static in shape
and waits for nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch

from .topology import Topology

#: What the head makes of ``n`` nodes of level ``level`` (1: children of the root):
#: ``expand(level, ids[B, n], feature[B, n, H], paths[B, n, level]) -> feature[B, n, H], states[B, n, H]``.
#: ``paths`` are the scratch entries of each node's ancestors, the last one its own, counted from 0.
Expand = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
#: ``choose(level, states[B, n, H]) -> ids[B, n, K], scores[B, n, K]``: the best children of ``n`` nodes of
#: ``level`` (0: the root).
Choose = Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@attrs.frozen(eq=False)
class _Level:
    """The nodes of one level that have children, and those children; indices, all int64."""

    inner: torch.Tensor  #: ``[n]`` nodes
    paths: torch.Tensor  #: ``[n, level]`` scratch entries of their ancestors and of themselves
    children: torch.Tensor  #: ``[m]`` nodes of the next level
    parents: torch.Tensor  #: ``[m]`` place in ``inner`` of each child's parent
    ranks: torch.Tensor  #: ``[m]``


class FixedTree:
    """A topology with its indices on the device, so that a step copies nothing there."""

    def __init__(self, tree: Topology, device: torch.device) -> None:
        def on_device(values: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        self.fanout, self._count = tree.fanout, len(tree)
        #: the first node of each level: a tree of fewer nodes has no level whose first is none of them
        self.starts = [tree.at(level)[0] for level in range(1, tree.depth + 1)]
        self.parents = on_device(tree.parents)
        self.depths = on_device(tree.depths)
        first = tree.at(1)
        self.first, self.first_ranks = on_device(first), on_device([tree.ranks[node] for node in first])
        entry = {node: place for place, node in enumerate(tree.inner)}
        self.levels: list[_Level] = []
        for level in range(1, tree.depth):
            inner = [node for node in tree.at(level) if node in entry]
            children = tree.at(level + 1)
            self.levels.append(
                _Level(
                    inner=on_device(inner),
                    paths=on_device([[entry[node] for node in tree.path(end)] for end in inner]),
                    children=on_device(children),
                    parents=on_device([inner.index(tree.parents[node]) for node in children]),
                    ranks=on_device([tree.ranks[node] for node in children]),
                )
            )

    def __len__(self) -> int:
        return self._count

    def lens_within(self, room: torch.Tensor) -> torch.Tensor:
        """``[B]``: how many nodes lie within ``room`` levels; they come first."""
        return (self.depths[None] <= room[:, None]).sum(-1)

    def place_laws(self, probs: torch.Tensor, level: int, laws: torch.Tensor) -> None:
        """Write the laws of the children of a level's nodes to those children.

        Args:
            probs: ``[B, N, V]``, written.
            level: of the parents, 0 = the root.
            laws: ``[B, n, K, V]``, of the parents that have children.
        """
        if level:
            at = self.levels[level - 1]
            probs[:, at.children] = laws[:, at.parents, at.ranks]
        else:
            probs[:, self.first] = laws[:, 0, self.first_ranks]


def fill(
    tree: FixedTree,
    choose: Choose,
    expand: Expand,
    feature: torch.Tensor,
    states: torch.Tensor,
    *,
    width: int | None = None,
) -> torch.Tensor:
    """Token ids ``[B, N]`` of the nodes of a fixed tree.

    Args:
        feature, states: ``[B, H]``, the root's.
        width: the first nodes that are wanted; levels without any are left out. None: all.
    """
    batch, count = feature.shape[0], len(tree)
    ids = torch.zeros(batch, count, dtype=torch.int64, device=feature.device)
    # Each node's feature to be expanded with: its parent's.
    above = torch.zeros(batch, count, feature.shape[-1], dtype=feature.dtype, device=feature.device)
    best, _ = choose(0, states[:, None])
    ids[:, tree.first] = best[:, 0, tree.first_ranks]
    above[:, tree.first] = feature[:, None].expand(-1, tree.first.shape[0], -1)
    for level, at in enumerate(tree.levels, 1):
        if width is not None and tree.starts[level] >= width:
            break
        made, inner_states = expand(
            level, ids[:, at.inner], above[:, at.inner], at.paths[None].expand(batch, -1, -1)
        )
        best, _ = choose(level, inner_states)
        ids[:, at.children] = best[:, at.parents, at.ranks]
        above[:, at.children] = made[:, at.parents]
    return ids


@attrs.frozen
class Grown:
    """The nodes of a tree for each row, best first, parent before child."""

    ids: torch.Tensor  #: ``[B, N]`` int64
    parents: torch.Tensor  #: ``[B, N]`` int64, -1 = root
    lens: torch.Tensor  #: ``[B]`` int64: how many nodes there are; the rest is filling


def grow(
    choose: Choose,
    expand: Expand,
    feature: torch.Tensor,
    states: torch.Tensor,
    *,
    fanout: int,
    depth: int,
    width: int,
    room: torch.Tensor,
) -> Grown:
    """Expand each level's best ``fanout`` nodes by as many children, and keep the best ``width`` of all.

    A node's score is the sum of its path's. No child scores above its parent, and of equals the older comes
    first: so the nodes kept are closed under parents, and the best ``n`` of them are the tree of ``n`` nodes.
    Scratch entry ``(level - 1) * fanout + j`` belongs to the ``j``-th node expanded of a level.

    Args:
        feature, states: ``[B, H]``, the root's.
        room: ``[B]`` int64, most levels of each row.
    """
    batch = feature.shape[0]
    best, scores = choose(0, states[:, None])
    ids, total = best[:, 0], confidence(scores[:, 0])
    all_ids, all_scores, expanded = [ids], [total], []
    entries = torch.arange(fanout * depth, device=ids.device).expand(batch, -1).split(fanout, 1)
    nodes, above, paths = entries[0], feature[:, None].expand(-1, fanout, -1), entries[0][..., None]
    for level in range(1, depth):
        made, inner_states = expand(level, ids, above, paths)
        children, scores = choose(level, inner_states)
        candidates = (total[..., None] + confidence(scores)).flatten(1)
        first = fanout + (level - 1) * fanout * fanout
        all_ids.append(children.flatten(1))
        all_scores.append(candidates)
        expanded.append(nodes)
        total, chosen = _best(candidates, fanout)
        ids, nodes = all_ids[-1].gather(1, chosen), first + chosen
        parent = (chosen // fanout)[..., None]
        above = made.gather(1, parent.expand(-1, -1, made.shape[-1]))
        ancestors = paths.gather(1, parent.expand(-1, -1, level))
        paths = torch.cat((ancestors, entries[level][..., None]), dim=-1)
    parents = torch.full_like(all_ids[0], -1)
    if expanded:
        parents = torch.cat((parents, torch.cat(expanded, 1).repeat_interleave(fanout, dim=1)), 1)
    scores = torch.cat(all_scores, 1)
    # Levels, from 0 on, have one time ``fanout`` nodes, then its square: as if the first had the square, too.
    missing = fanout * fanout - fanout
    numbers = torch.arange(missing, missing + scores.shape[1], device=ids.device)
    deep = numbers // (fanout * fanout) >= room[:, None]
    return _keep(torch.cat(all_ids, 1), parents, scores.masked_fill(deep, -torch.inf), width)


def confidence(scores: torch.Tensor) -> torch.Tensor:
    """Log-confidences ``[..., K]``, none above 0, of the scores of siblings.

    Those of a greedy row are log-probabilities and stay as they are, which is EAGLE-2. Those of a sampled row
    hold the target's noise; where they stand for more than all there can be they are taken relative to each
    other. -inf where a token cannot be drawn.
    """
    most = scores.logsumexp(-1, keepdim=True).clamp(min=0.0)
    return torch.nan_to_num(scores - most, nan=-torch.inf, neginf=-torch.inf).clamp(max=0.0)


def _keep(ids: torch.Tensor, parents: torch.Tensor, scores: torch.Tensor, width: int) -> Grown:
    """The best ``width`` nodes, their parents renumbered; filling where there are fewer."""
    count = ids.shape[1]
    best, order = _best(scores, count)
    place = torch.arange(count, device=ids.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(1, order, place)
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
