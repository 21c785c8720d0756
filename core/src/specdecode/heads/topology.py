"""Fixed draft trees: how they are written, and their nodes in order. No torch here."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

import attrs

from ..contract import MAX_SPECULATIVE_TOKENS

_FORM = "must list for each node the ranks from the root to it, for example [(0,), (1,), (0, 0)]"


def parse_tree(value: str | Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """The paths of ``speculative_token_tree``; ValueError if they are no tree."""
    paths: Any = value
    if isinstance(value, str):
        try:
            paths = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise ValueError(f"{_FORM}, got {value[:60]!r}") from None
    if not isinstance(paths, (list, tuple)) or not paths:
        raise ValueError(f"{_FORM}, got {value!r}")
    if len(paths) > MAX_SPECULATIVE_TOKENS:
        raise ValueError(f"must have at most {MAX_SPECULATIVE_TOKENS} nodes, got {len(paths)}")
    for path in paths:
        ranks = isinstance(path, (list, tuple)) and all(type(r) is int and 0 <= r < 1024 for r in path)
        if not ranks or not path:
            raise ValueError(f"{_FORM}, got the node {path!r}")
    nodes = [tuple(path) for path in paths]
    known = set(nodes)
    if len(known) < len(nodes):
        twice = next(path for path in nodes if nodes.count(path) > 1)
        raise ValueError(f"must name each node once, got {list(twice)} twice")
    for path in nodes:
        if len(path) > 1 and path[:-1] not in known:
            raise ValueError(f"must hold the parent of each node, got {list(path)} without {list(path[:-1])}")
    return nodes


@attrs.frozen
class Topology:
    """A fixed tree: node ``i`` is the child of rank ``ranks[i]`` of node ``parents[i]``; levels in order."""

    parents: tuple[int, ...]  #: -1 = the root
    ranks: tuple[int, ...]
    depths: tuple[int, ...]  #: 1 = children of the root

    @classmethod
    def from_paths(cls, paths: Sequence[tuple[int, ...]]) -> Topology:
        ordered = sorted(paths, key=lambda path: (len(path), path))
        index = {path: node for node, path in enumerate(ordered)}
        return cls(
            parents=tuple(index[path[:-1]] if len(path) > 1 else -1 for path in ordered),
            ranks=tuple(path[-1] for path in ordered),
            depths=tuple(len(path) for path in ordered),
        )

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def depth(self) -> int:
        return max(self.depths)

    @property
    def fanout(self) -> int:
        """Most children asked of a node."""
        return max(self.ranks) + 1

    @property
    def inner(self) -> tuple[int, ...]:
        """The nodes that have children, in order: those that the head computes."""
        return tuple(sorted({parent for parent in self.parents if parent >= 0}))

    def at(self, level: int) -> list[int]:
        """Nodes of a level, 1 = children of the root."""
        return [node for node, depth in enumerate(self.depths) if depth == level]

    def path(self, node: int) -> list[int]:
        """Nodes from the first level down to ``node``."""
        parent = self.parents[node]
        return [node] if parent < 0 else [*self.path(parent), node]
