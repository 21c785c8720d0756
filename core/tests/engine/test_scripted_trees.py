"""Draft trees against a brute-force reading of their definition, on a made-up head."""

from __future__ import annotations

import itertools

import pytest
import torch
from specdecode.testing.scripted.config import EagleConfig, Topology
from specdecode.testing.scripted.trees import FixedTree, fill, grow

VOCAB, HIDDEN = 40, 6
PATHS = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 2]]


class Head:
    """Logits of a node are a function of its path; a node is known by its ancestors' scratch entries."""

    def __init__(self, batch: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(VOCAB, VOCAB, generator=generator)
        self.mix = torch.randn(HIDDEN, VOCAB, generator=generator)
        self.roots = torch.randn(batch, HIDDEN, generator=generator)
        self.entries: dict[tuple[int, int], int] = {}

    def rank(self, hidden, token, k):
        logits = hidden @ self.mix + (0 if token is None else self.table[token])
        return logits.log_softmax(-1).topk(k)

    def below(self, hidden, token):
        return torch.tanh(hidden + token / VOCAB)

    def expand(self, k):
        def call(level, ids, hidden, paths):
            batch, nodes, depth = paths.shape
            assert depth == level and ids.shape == (batch, nodes)
            states = torch.empty(batch, nodes, HIDDEN)
            children = torch.empty(batch, nodes, k, dtype=torch.int64)
            scores = torch.empty(batch, nodes, k)
            for b, n in itertools.product(range(batch), range(nodes)):
                token = int(ids[b, n])
                self.entries[b, int(paths[b, n, -1])] = token
                states[b, n] = self.below(hidden[b, n], token)
                best = self.rank(states[b, n], token, k)
                children[b, n], scores[b, n] = best.indices, best.values
            self.paths = paths
            return states, children, scores

        return call

    def root(self, k):
        best = [self.rank(hidden, None, k) for hidden in self.roots]
        return torch.stack([b.indices for b in best]), torch.stack([b.values for b in best])


def test_topology_of_paths():
    tree = Topology.from_paths(PATHS)
    assert tree.parents == (-1, -1, -1, 0, 0, 1, 3, 4)
    assert tree.depths == (1, 1, 1, 2, 2, 2, 3, 3)
    assert (tree.depth, tree.fanout, tree.path(6)) == (3, 3, [0, 3, 6])
    placed = FixedTree(tree, torch.device("cpu"))
    assert placed.lens_within(torch.tensor([0, 1, 2, 9])).tolist() == [0, 3, 6, 8]


def test_a_fixed_tree_holds_the_ranked_child_at_each_node():
    head, tree = Head(batch=2), Topology.from_paths(PATHS)
    ids, _ = head.root(tree.fanout)
    filled = fill(FixedTree(tree, torch.device("cpu")), head.expand(tree.fanout), ids, head.roots)
    for b, path in itertools.product(range(2), PATHS):
        hidden, token = head.roots[b], None
        for rank in path:
            if token is not None:
                hidden = head.below(hidden, token)
            token = int(head.rank(hidden, token, tree.fanout).indices[rank])
        assert filled[b, sorted(PATHS, key=lambda p: (len(p), p)).index(path)] == token


@pytest.mark.parametrize(("depth", "width", "k"), [(1, 3, 3), (3, 7, 2), (4, 9, 3), (3, 40, 3)])
def test_a_grown_tree_is_the_best_of_all_expanded(depth, width, k):
    batch = 3
    head = Head(batch, seed=depth)
    ids, scores = head.root(k)
    room = torch.tensor([depth, 1, 0])
    grown = grow(head.expand(k), ids, scores, head.roots, depth=depth, width=width, room=room)
    for b in range(batch):
        want = _grown_by_hand(head, b, depth, k)
        want = [node for node in want if node["level"] <= int(room[b])]
        best = sorted(want, key=lambda node: (-node["score"], node["born"]))[:width]
        count = int(grown.lens[b])
        assert count == len(best)
        assert grown.ids[b, :count].tolist() == [node["token"] for node in best]
        parents = [-1 if node["parent"] is None else best.index(node["parent"]) for node in best]
        assert grown.parents[b, :count].tolist() == parents
        assert all(parent < child for child, parent in enumerate(parents))


def _grown_by_hand(head, b, depth, k):
    def children(parent, hidden, token, level, born):
        best = head.rank(hidden, token, k)
        relative = best.values.log_softmax(-1)
        return [
            {
                "token": int(best.indices[rank]),
                "parent": parent,
                "score": float(relative[rank]) + (parent["score"] if parent else 0.0),
                "level": level,
                "hidden": hidden,
                "born": born + rank,
            }
            for rank in range(k)
        ]

    nodes = children(None, head.roots[b], None, 1, 0)
    front = list(nodes)
    for level in range(2, depth + 1):
        candidates = []
        for parent in front:
            hidden = head.below(parent["hidden"], parent["token"])
            candidates += children(parent, hidden, parent["token"], level, len(nodes) + len(candidates))
        nodes += candidates
        front = sorted(candidates, key=lambda node: (-node["score"], node["born"]))[:k]
    return nodes


def test_tokens_that_cannot_be_drawn_are_not_drafted():
    ids = torch.tensor([[4, 5, 6]])
    scores = torch.tensor([[0.0, -torch.inf, -torch.inf]])

    def expand(level, ids, hidden, paths):
        children = torch.tensor([[[1, 2, 3]]]).expand(1, 3, 3)
        none = torch.full((1, 3, 3), -torch.inf)
        return hidden, children, none

    grown = grow(expand, ids, scores, torch.zeros(1, HIDDEN), depth=2, width=5, room=torch.tensor([2]))
    assert grown.lens.tolist() == [1] and grown.ids[0, 0] == 4 and grown.parents[0, 0] == -1


@pytest.mark.parametrize(
    ("keys", "levels", "scratch"),
    [
        ({"num_speculative_tokens": 4}, 4, 3),
        ({"num_speculative_tokens": 9, "fanout": 3, "depth": 4}, 4, 9),
        ({"num_speculative_tokens": 8, "tree": PATHS}, 3, 8),
    ],
)
def test_scratch_entries_of_a_head(keys, levels, scratch):
    config = EagleConfig(**keys)
    assert (config.levels, config.scratch) == (levels, scratch)


def test_a_tree_has_one_shape():
    with pytest.raises(ValueError, match="exclude each other"):
        EagleConfig(num_speculative_tokens=8, tree=PATHS, fanout=2)
    with pytest.raises(ValueError, match="8 nodes"):
        EagleConfig(num_speculative_tokens=5, tree=PATHS)
