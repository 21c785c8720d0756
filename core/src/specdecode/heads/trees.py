"""Draft trees over a batch: a fixed topology, and one that grows by confidence (EAGLE-2, arXiv 2406.16858).

Legend: ``B`` rows, ``K`` children a node, ``N`` nodes of the tree, ``H`` hidden size. All is static in shape
and waits for nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch
from specdec_kernels.trees import Candidates, Tree, extend, keep

from ..contract import Drafts
from .topology import Topology

#: What the head makes of ``n`` nodes of level ``level`` (1: children of the root):
#: ``expand(level, ids[B, n], feature[B, m, H], rows[B * n], paths[B, n, level])`` gives each node's feature
#: and states, both ``[B, n, H]``. ``feature`` is of the ``m`` nodes of the level before, and ``rows`` tells
#: which of these ``B * m`` is the parent of each. ``paths`` are the scratch entries of each node's ancestors,
#: the last one its own, counted from ``first`` on, or from 0.
Expand = Callable[
    [int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]
]
#: ``choose(level, states[B, n, H]) -> ids[B, n, K], scores[B, n, K]``: the best children of ``n`` nodes of
#: ``level`` (0: the root).
Choose = Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@attrs.frozen(eq=False)
class _Level:
    """The nodes of one level that have children, and those children; indices, all int64."""

    inner: torch.Tensor  #: ``[n]`` nodes
    above: torch.Tensor  #: ``[n]`` place in the level before's ``inner`` of each node's parent; 0: the root
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
        before: list[int] = []
        for level in range(1, tree.depth):
            inner = [node for node in tree.at(level) if node in entry]
            above = [before.index(tree.parents[node]) if before else 0 for node in inner]
            children = tree.at(level + 1)
            self.levels.append(
                _Level(
                    inner=on_device(inner),
                    above=on_device(above),
                    paths=on_device([[entry[node] for node in tree.path(end)] for end in inner]),
                    children=on_device(children),
                    parents=on_device([inner.index(tree.parents[node]) for node in children]),
                    ranks=on_device([tree.ranks[node] for node in children]),
                )
            )
            before = inner

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
    first: torch.Tensor | None = None,
) -> torch.Tensor:
    """Token ids ``[B, N]`` of the nodes of a fixed tree.

    Args:
        feature, states: ``[B, H]``, the root's.
        width: the first nodes that are wanted; levels without any are left out. None: all.
        first: ``[B]`` int64, each row's first scratch entry (its slot, say); None: 0.
    """
    batch, count = feature.shape[0], len(tree)
    ids = torch.zeros(batch, count, dtype=torch.int64, device=feature.device)
    best, _ = choose(0, states[:, None])
    ids[:, tree.first] = best[:, 0, tree.first_ranks]
    feature, numbers = feature[:, None], torch.arange(batch, device=feature.device)[:, None]
    for level, at in enumerate(tree.levels, 1):
        if width is not None and tree.starts[level] >= width:
            break
        rows = (numbers * feature.shape[1] + at.above).flatten()
        paths = at.paths[None].expand(batch, -1, -1) if first is None else first[:, None, None] + at.paths
        feature, inner_states = expand(level, ids[:, at.inner], feature, rows, paths)
        best, _ = choose(level, inner_states)
        ids[:, at.children] = best[:, at.parents, at.ranks]
    return ids


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
    first: torch.Tensor | None = None,
    budget: torch.Tensor | None = None,
    out: Drafts | None = None,
) -> Tree:
    """Expand each level's best ``fanout`` nodes by as many children, and keep the best ``width`` of all.

    See :mod:`specdec_kernels.trees`: the nodes kept are closed under parents, and the best ``n`` of them are
    the tree of ``n`` nodes. Where there are no more than ``width`` candidates, all are kept.

    Args:
        feature, states: ``[B, H]``, the root's.
        room: ``[B]`` int64, most levels of each row.
        first: as of :func:`fill`.
        budget: ``[B]`` int64, most nodes of each row; None: ``width``.
        out: where the tree is written.
    """
    candidates = Candidates.empty(feature.shape[0], fanout, depth, feature.device, first)
    level = extend(candidates, None, *choose(0, states[:, None]))
    feature = feature[:, None]
    for number in range(1, depth):
        feature, inner_states = expand(number, level.ids, feature, level.rows, level.paths)
        level = extend(candidates, level, *choose(number, inner_states))
    count = min(width, candidates.ids.shape[1])
    written = None if out is None else Tree(out.ids[:, :count], out.parents[:, :count], out.lens)
    return keep(candidates, room, count, budget, written)
