"""Both kinds of trees against slow ones that are written with lists."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from specdec_kernels.trees.reference import confidence
from specdecode.heads.topology import Topology, parse_tree
from specdecode.heads.trees import FixedTree, fill, grow

VOCAB = 7


class World:
    """A head whose logits depend on the row and the whole path; it checks the scratch entries it is given."""

    def __init__(self, rows, fanout, steps):
        self.rows, self.fanout, self.steps = rows, fanout, steps
        self.written = {}

    def children(self, row, path):
        """The best ids of a node and their log-probabilities, which are coarse, so that there are ties."""
        generator = torch.Generator().manual_seed(hash((row, *path)) % 2**31)
        logits = (torch.rand(VOCAB, generator=generator) * self.steps).round() / self.steps * 3
        scores = logits.log_softmax(-1)
        ids = sorted(range(VOCAB), key=lambda i: (-float(scores[i]), i))[: self.fanout]
        return ids, [float(scores[i]) for i in ids]

    # A feature says which path it is of, as a number to the base VOCAB + 1.
    def decode(self, number):
        path, number = [], int(number)
        while number:
            path.append(number % (VOCAB + 1) - 1)
            number //= VOCAB + 1
        return tuple(reversed(path))

    def choose(self, level, states):
        found = [
            [self.children(row, self.decode(n)) for n in nodes]
            for row, nodes in enumerate(states[..., 0].tolist())
        ]
        assert all(len(self.decode(n)) == level for nodes in states[..., 0].tolist() for n in nodes)
        return (
            torch.tensor([[ids for ids, _ in nodes] for nodes in found]),
            torch.tensor([[scores for _, scores in nodes] for nodes in found]),
        )

    def expand(self, level, ids, feature, rows, paths):
        made = feature.flatten(0, 1)[rows].view(*ids.shape, -1) * (VOCAB + 1) + ids[..., None] + 1
        for row, node in itertools.product(range(ids.shape[0]), range(ids.shape[1])):
            entries, path = paths[row, node].tolist(), self.decode(made[row, node, 0])
            self.written[row, entries[-1]] = path
            seen = [self.written[row, entry] for entry in entries]
            assert seen == [path[:length] for length in range(1, level + 1)]
        return made, made

    def root(self):
        return torch.zeros(self.rows, 1, dtype=torch.float64)


def eagle2(world, row, depth, width, room):
    """Expand the best nodes of each level, keep the best of all: ids, parents; ties by creation order."""
    nodes, frontier = [], [((), 0.0)]
    for level in range(1, depth + 1):
        born = []
        for path, total in frontier:
            ids, scores = world.children(row, path)
            born += [((*path, i), total + s, level) for i, s in zip(ids, scores, strict=True)]
        nodes += born
        order = sorted(range(len(born)), key=lambda i: (-round(born[i][1], 5), i))[: world.fanout]
        frontier = [(born[i][0], born[i][1]) for i in order]
    allowed = [node for node in nodes if node[2] <= room]
    kept = sorted(range(len(allowed)), key=lambda i: (-round(allowed[i][1], 5), i))[:width]
    paths = [allowed[i][0] for i in kept]
    return [p[-1] for p in paths], [paths.index(p[:-1]) if len(p) > 1 else -1 for p in paths]


@pytest.mark.parametrize("steps", [1000, 2])
@pytest.mark.parametrize(
    ("fanout", "depth", "width"), [(3, 4, 9), (2, 5, 20), (1, 3, 3), (4, 2, 30), (3, 1, 2)]
)
def test_a_grown_tree_is_eagle2s(fanout, depth, width, steps):
    rooms = torch.tensor([depth, 1, 0, 2])
    world = World(len(rooms), fanout, steps)
    # In float64 sums of the same terms agree with the lists'; ties are then ties in both.
    grown = grow(
        world.choose,
        world.expand,
        world.root(),
        world.root(),
        fanout=fanout,
        depth=depth,
        width=width,
        room=rooms,
    )
    for row, room in enumerate(rooms.tolist()):
        ids, parents = eagle2(world, row, depth, width, room)
        count = int(grown.lens[row])
        assert count == len(ids)
        if steps == 1000:
            assert grown.ids[row, :count].tolist() == ids
            assert grown.parents[row, :count].tolist() == parents
        for node, parent in enumerate(grown.parents[row, :count].tolist()):
            assert -1 <= parent < node
        smaller = grow(
            world.choose,
            world.expand,
            world.root(),
            world.root(),
            fanout=fanout,
            depth=depth,
            width=1,
            room=rooms,
        )
        assert count == 0 or smaller.ids[row, 0] == grown.ids[row, 0]  # the best n are the tree of n


def test_ties_go_to_the_older_node():
    def choose(level, states):
        nodes = states.shape[1]
        return torch.arange(3).expand(1, nodes, 3), torch.full((1, nodes, 3), -math.log(3.0))

    def expand(level, ids, feature, rows, paths):
        made = feature.flatten(0, 1)[rows].view(*ids.shape, -1)
        return made, made

    root = torch.zeros(1, 1)
    grown = grow(choose, expand, root, root, fanout=3, depth=2, width=6, room=torch.tensor([2]))
    assert grown.ids.tolist() == [[0, 1, 2, 0, 1, 2]]
    assert grown.parents.tolist() == [[-1, -1, -1, 0, 0, 0]]


@pytest.mark.parametrize(
    "paths", [[[0]], [[0], [1], [0, 0], [0, 2], [1, 0], [0, 2, 1], [1, 0, 0]], [[0], [0, 0], [0, 0, 0]]]
)
def test_a_fixed_tree_takes_its_ranks(paths):
    topology = Topology.from_paths(parse_tree(paths))
    tree = FixedTree(topology, torch.device("cpu"))
    world = World(2, topology.fanout, 1000)
    ids = fill(tree, world.choose, world.expand, world.root(), world.root())
    for row in range(2):
        for node in range(len(topology)):
            path: tuple[int, ...] = ()
            for step in topology.path(node):
                path = (*path, world.children(row, path)[0][topology.ranks[step]])
            assert ids[row, node] == path[-1]
    assert len({entry for _, entry in world.written}) == len(topology.inner)  # no entry for a leaf
    for width in range(1, len(topology) + 1):
        fewer = fill(tree, world.choose, world.expand, world.root(), world.root(), width=width)
        assert torch.equal(fewer[:, :width], ids[:, :width])
    assert tree.lens_within(torch.tensor([0, 1, 9])).tolist() == [0, len(topology.at(1)), len(topology)]


@pytest.mark.parametrize("width", [1, 2, 3])
def test_a_level_without_wanted_nodes_is_not_computed(width):
    tree = FixedTree(Topology.from_paths(parse_tree([[0], [0, 0], [0, 0, 0]])), torch.device("cpu"))
    world = World(1, 1, 1000)
    fill(tree, world.choose, world.expand, world.root(), world.root(), width=width)
    assert len(world.written) == width - 1


def test_laws_are_told_of_the_children_that_the_tree_has():
    tree = FixedTree(Topology.from_paths(parse_tree([[0], [2], [2, 1]])), torch.device("cpu"))
    probs = torch.zeros(1, 3, 5)
    first, second = torch.rand(1, 1, 3, 5), torch.rand(1, 1, 3, 5)
    tree.place_laws(probs, 0, first)
    tree.place_laws(probs, 1, second)
    assert torch.equal(probs[0], torch.stack((first[0, 0, 0], first[0, 0, 2], second[0, 0, 1])))


def test_a_tree_may_be_written_in_any_order_and_as_text():
    paths = [[0, 0, 0], [1], [0], [0, 0]]
    assert Topology.from_paths(parse_tree(paths)) == Topology.from_paths(
        parse_tree(str([tuple(p) for p in paths]))
    )
    assert Topology.from_paths(parse_tree(paths)).parents == (-1, -1, 0, 2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[", "must list for each node"),
        ("[]", "must list for each node"),
        ("[(0,), ()]", r"got the node \(\)"),
        ("[(0,), (-1,)]", r"got the node \(-1,\)"),
        ("[(0,), (True,)]", r"got the node \(True,\)"),
        ("[(0,), (0,)]", r"each node once, got \[0\] twice"),
        ("[(0,), (1, 0)]", r"got \[1, 0\] without \[1\]"),
        (str([(i,) for i in range(1024)] + [(0, 0)]), "at most 1024 nodes, got 1025"),
    ],
)
def test_what_is_no_tree_is_told(text, said):
    with pytest.raises(ValueError, match=said):
        parse_tree(text)


def test_sampled_trees_rank_with_the_targets_noise():
    greedy = torch.tensor([[-0.1, -3.0]])
    assert torch.equal(confidence(greedy), greedy)  # EAGLE-2's own
    sampled = confidence(torch.tensor([[4.0, 1.0, -torch.inf]]))
    torch.testing.assert_close(sampled, torch.tensor([[4.0, 1.0, -torch.inf]]).log_softmax(-1))
    assert bool((confidence(torch.full((1, 2), -torch.inf)) == -torch.inf).all())
