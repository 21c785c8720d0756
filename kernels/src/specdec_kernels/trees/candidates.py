"""What a tree is grown from."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True, eq=False)
class Candidates:
    """All nodes that were drafted; filled level by level."""

    ids: torch.Tensor  #: ``[B, C]`` int64
    scores: torch.Tensor  #: ``[B, C]`` float32, of their paths
    parents: torch.Tensor  #: ``[B, C]`` int64, which candidate; -1: the root
    fanout: int
    first: torch.Tensor | None  #: ``[B]`` int64, the number of the first scratch entry; None: 0

    @classmethod
    def empty(
        cls, batch: int, fanout: int, depth: int, device: torch.device, first: torch.Tensor | None = None
    ) -> Candidates:
        shape = (batch, num_candidates(fanout, depth))
        ids, parents = (torch.empty(shape, dtype=torch.int64, device=device) for _ in range(2))
        return cls(ids, torch.empty(shape, dtype=torch.float32, device=device), parents, fanout, first)


@dataclasses.dataclass(frozen=True, eq=False)
class Level:
    """The nodes of a level that go on."""

    ids: torch.Tensor  #: ``[B, K]`` int64
    total: torch.Tensor  #: ``[B, K]`` float32, the scores of their paths
    nodes: torch.Tensor  #: ``[B, K]`` int64, which candidates they are
    rows: torch.Tensor  #: ``[B * K]`` int64, their parents among the ``B * n`` nodes of the level before
    #: ``[B, K, levels]`` int64: the scratch entries of their ancestors and of themselves. Entry
    #: ``first + (level - 1) * K + j`` is of the ``j``-th node of a level.
    paths: torch.Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Tree:
    """The nodes of a tree for each row, best first, parent before child."""

    ids: torch.Tensor  #: ``[B, N]`` int64
    parents: torch.Tensor  #: ``[B, N]`` int64, -1 = root
    lens: torch.Tensor  #: ``[B]`` int64: how many nodes there are; the rest is filling


def num_candidates(fanout: int, depth: int) -> int:
    """Of a tree of ``depth`` levels."""
    return fanout + (depth - 1) * fanout * fanout


def first_candidate(fanout: int, level: int) -> int:
    """Of a level, from 1 on."""
    return 0 if level == 1 else num_candidates(fanout, level - 1)
