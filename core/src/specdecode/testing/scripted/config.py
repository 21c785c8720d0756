"""Configuration of the scripted proposers; light, so that listing them imports neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs

from ...contract import LengthFields, option, within


@attrs.frozen(kw_only=True)
class ScriptFields(LengthFields):
    """The texts that a scripted proposer knows."""

    texts: tuple[tuple[int, ...], ...] = option(
        "whole sequences, prompt and output, to draft from; a history that begins none gets no drafts",
        default=(),
    )


@attrs.frozen(kw_only=True)
class OracleConfig(ScriptFields):
    wrong_at: tuple[int, ...] = option("offsets of each draft to spoil", default=())


@attrs.frozen(kw_only=True)
class OracleTreeConfig(ScriptFields):
    depth: int | None = option("most levels; none: as many as nodes", default=None, validator=within(1))
    decoys: float = option("share of nodes that are not part of the text", default=0.45)
    seed: int = option("which scrambling", default=0)

    @property
    def levels(self) -> int:
        return min(self.depth or self.num_speculative_tokens, self.num_speculative_tokens)


@attrs.frozen(kw_only=True)
class FaultyConfig(ScriptFields):
    fault: Literal[
        "raises",
        "raises-half-way",
        "exits",
        "raises-in-on-add",
        "raises-in-on-commit",
        "raises-in-on-preempt",
        "raises-in-on-finish",
        "raises-in-on-target-updated",
        "raises-in-metrics",
        "id-too-high",
        "id-huge",
        "id-negative",
        "cyclic-parents",
        "late-parent",
        "parent-below-root",
        "too-many",
        "more-than-width",
        "negative-lens",
        "past-room",
        "keeps-buffers",
        "nan-scores",
        "writes-into-view",
        "replaces-buffers",
    ] = option("how it breaks the contract")
    every: int = option("which of its calls do: every n-th", default=1, validator=within(1))
    place: Literal["host", "device"] = option("where it says it works", default="host")


@attrs.frozen(kw_only=True)
class WrongConfig(ScriptFields):
    fault: Literal[
        "waits",
        "rebinds-buffers",
        "returns-drafts",
        "keeps-buffers",
        "writes-into-view",
        "exceeds-budget",
        "bends-chain",
        "reads-undeclared",
        "reaches-around",
        "declares-taps",
        "leaks-on-abort",
        "leaks-unasked",
        "refuses-resumption",
        "forgets-preempted",
        "misspells-a-hook",
        "closes-once",
        "tells-nan",
        "peeks-at-neighbours",
        "remembers",
        "remembers-namespaces",
        "spoils-target",
        "takes-offence",
        "takes-revenge",
        "doubles-resumed",
        "stale-entries",
        "loses-its-place",
        "counts-padding",
        "rebinds-state",
        "copies-indices",
    ] = option("how it breaks the contract")


@attrs.frozen(kw_only=True)
class FlakyConfig:
    inner: Mapping[str, Any] = option("speculative_config of the proposer that fails now and then")
    every: int = option("which of its calls fail: every n-th", default=4, validator=within(1))
    calls: tuple[int, ...] = option("which of its calls fail, from 1 on, instead of every n-th", default=())
    after: bool = option("whether it fails after the inner proposer, or before it", default=False)


@attrs.frozen(kw_only=True)
class SelfDraftConfig(LengthFields):
    layers: int | None = option(
        "how many of the target's first layers draft; none: all", default=None, validator=within(1)
    )


@attrs.frozen(kw_only=True)
class SmallDraftConfig(LengthFields):
    model: str = option("path of the draft checkpoint")


@attrs.frozen
class Topology:
    """A fixed tree: node ``i`` is the child of rank ``ranks[i]`` of node ``parents[i]``; levels in order."""

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    depths: tuple[int, ...]

    @classmethod
    def from_paths(cls, paths: Sequence[Sequence[int]]) -> Topology:
        """From the ranks that lead from the root to each node: ``[[0], [1], [0, 0]]``."""
        ordered = sorted((tuple(path) for path in paths), key=lambda path: (len(path), path))
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

    def at(self, level: int) -> list[int]:
        """Nodes of a level, 1 = children of the root."""
        return [node for node, depth in enumerate(self.depths) if depth == level]

    def path(self, node: int) -> list[int]:
        """Nodes from the first level down to ``node``."""
        parent = self.parents[node]
        return [node] if parent < 0 else [*self.path(parent), node]


@attrs.frozen(kw_only=True)
class EagleConfig(LengthFields):
    """A chain by default; ``tree`` gives a fixed topology, ``fanout`` one that grows by score."""

    three_taps: bool = option(
        "read three boundaries, as EAGLE-3, and not the final hidden state", default=False
    )
    tree: tuple[tuple[int, ...], ...] = option(
        "fixed topology: the ranks from the root to each node", default=()
    )
    fanout: int | None = option("grow a tree with so many children a node", default=None, validator=within(1))
    depth: int | None = option(
        "most levels of a grown tree; none: as many as nodes", default=None, validator=within(1)
    )
    seed: int = option("which weights", default=1)

    def __attrs_post_init__(self) -> None:
        if self.tree and self.fanout:
            raise ValueError("tree and fanout exclude each other: the tree is fixed or grows")
        if self.tree and len(self.tree) != self.num_speculative_tokens:
            raise ValueError(f"num_speculative_tokens must be the tree's {len(self.tree)} nodes")

    @property
    def topology(self) -> Topology | None:
        return Topology.from_paths(self.tree) if self.tree else None

    @property
    def levels(self) -> int:
        if self.topology is not None:
            return self.topology.depth
        return min(self.depth or self.num_speculative_tokens, self.num_speculative_tokens)

    @property
    def scratch(self) -> int:
        """Draft entries that the expanded nodes occupy."""
        if self.tree:
            return self.num_speculative_tokens
        return (self.fanout or 1) * (self.levels - 1)


@attrs.frozen(kw_only=True)
class MedusaConfig:
    tree: tuple[tuple[int, ...], ...] = option(
        "topology: the ranks from the root to each node",
        default=((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)),
    )
    seed: int = option("which weights", default=3)

    @property
    def topology(self) -> Topology:
        return Topology.from_paths(self.tree)


@attrs.frozen(kw_only=True)
class SamplerConfig(LengthFields):
    """A chain by default; ``tree`` gives a fixed topology."""

    tree: tuple[tuple[int, ...], ...] = option(
        "fixed topology: the ranks from the root to each node", default=()
    )
    siblings: Literal["without-replacement", "independent"] = option(
        "how the children of a node are drawn", default="without-replacement"
    )
    near: float = option("how much of the target's logits its own hold", default=0.5)
    spread: float = option("size of the random part of its logits", default=1.0)
    seed: int = option("which random part", default=5)
    tells: Literal["law", "nothing"] = option("whether it gives its probabilities", default="law")
    lie: Literal["argmax", "zero", "sum", "negative", "nan"] | None = option(
        "how its probabilities break the contract: they are of a draw, and it gives the likeliest; or those "
        "of its last node are no law, or exclude the draft",
        default=None,
    )

    def __attrs_post_init__(self) -> None:
        if self.tree and len(self.tree) != self.num_speculative_tokens:
            raise ValueError(f"num_speculative_tokens must be the tree's {len(self.tree)} nodes")

    @property
    def topology(self) -> Topology:
        chain = [(0,) * depth for depth in range(1, self.num_speculative_tokens + 1)]
        return Topology.from_paths(self.tree or chain)


@attrs.frozen(kw_only=True)
class CascadeConfig:
    children: tuple[Mapping[str, Any], ...] = option(
        "speculative_config of each child, the first one asked first"
    )


@attrs.frozen(kw_only=True)
class RecorderConfig:
    inner: Mapping[str, Any] = option("speculative_config of the proposer to record")
    recording: str = option("name of the recording", default="default")
