"""What a suffix tree expects behind a path: the likeliest continuation, or a tree of several.

The choice is arctic-inference's, to the last bit of its 32-bit floats: of all suffixes of the context that
occur in the tree, each proposes; a long one may propose more; the highest sum of probabilities wins.
"""

from __future__ import annotations

import heapq
import struct
from collections.abc import Callable, Sequence

import attrs

from .tree import Leaf, Node, SuffixTree, count_of

_FLOAT32 = struct.Struct("f")


def float32(value: float) -> float:
    """``value`` rounded to 32 bits."""
    return _FLOAT32.unpack(_FLOAT32.pack(value))[0]


@attrs.frozen
class Draft:
    """Tokens to try, and how sure the counts are of them."""

    token_ids: Sequence[int] = ()
    parents: Sequence[int] = ()  #: index of the parent, -1 = the last token of the context
    probs: Sequence[float] = ()  #: estimated probability that the target goes this way, path included
    score: float = 0.0  #: sum of ``probs``: how many tokens are expected to be accepted
    match_len: int = 0  #: how many tokens of the context occurred before


NOTHING = Draft()


@attrs.frozen(kw_only=True)
class Limits:
    """How much may be drafted."""

    most: int  #: tokens
    factor: float  #: tokens for each token that matched
    min_prob: float  #: of a drafted token, its path included
    tree: bool = False  #: several continuations instead of the likeliest


def speculate(tree: SuffixTree, context: Sequence[int], limits: Limits, key: int | None = None) -> Draft:
    """The best draft for what follows ``context``.

    Args:
        context: its last ``tree.depth`` tokens are looked at.
        key: a text of the tree that may end as ``context`` does: where its suffixes end is known, others
            are looked for from the root.
    """
    longest = min(len(context), tree.depth) - 1
    if longest < 1 or limits.most < 1:
        return NOTHING
    tail = tuple(context[-longest:])
    spot: Callable[[int], tuple[Node | Leaf, int] | None]
    if key is not None and tuple(tree.text(key)[-longest:]) == tail:
        ends = tree.ends(key)
        longest = min(longest, len(ends))

        def spot(length: int) -> tuple[Node | Leaf, int] | None:
            node = ends[length - 1]
            return None if node is None else (node, len(node.edge))
    else:

        def spot(length: int) -> tuple[Node | Leaf, int] | None:
            return tree.find(tail[-length:])

        longest = _longest(spot, longest)

    factor, floor = float32(limits.factor), float32(limits.min_prob)
    grow = _tree if limits.tree else _chain
    sizes = []
    for length in range(longest, 0, -1):
        most = min(limits.most, int(float32(length * factor) + 1e-6))
        if not limits.tree:
            most = min(most, tree.depth - length)
        sizes.append((most, length))
    sizes.sort(reverse=True)
    best = NOTHING
    for most, length in sizes:
        # No probability is above 1, so no score above the number of tokens. Of equals the longest match wins.
        if most < best.score or not most:
            break
        found = None if most == best.score and length < best.match_len else spot(length)
        if found is not None:
            draft = grow(tree, *found, length, most, floor)
            if draft.score and (draft.score, length) > (best.score, best.match_len):
                best = attrs.evolve(draft, match_len=length)
    return best


def _longest(spot: Callable[[int], object], most: int) -> int:
    """Most tokens, up to ``most``, that occur: if many do, fewer do."""
    least = 0
    while least < most:
        middle = (least + most + 1) // 2
        if spot(middle) is None:
            most = middle - 1
        else:
            least = middle
    return least


def _chain(tree: SuffixTree, node: Node | Leaf, offset: int, depth: int, most: int, floor: float) -> Draft:
    """The likeliest child at every fork, until the way there is less likely than ``floor``."""
    ids: list[int] = []
    probs: list[float] = []
    score, prob = 0.0, 1.0
    edge = tree.run(node, depth - offset)[offset:]
    while len(ids) < most and prob >= floor:
        if len(edge):
            taken = edge[: most - len(ids)]
            ids += taken
            probs += [prob] * len(taken)
            for _ in taken:
                score = float32(score + prob)
        if not isinstance(node, Node) or not node.children or len(ids) == most:
            break
        child = node.children[next(iter(node.ranked()))]
        prob = float32(prob * float32(count_of(child) / node.count))
        node, edge = child, tree.run(child, depth + len(ids))
    return Draft(ids, range(-1, len(ids) - 1), probs, score)


@attrs.define(eq=False)
class _Fork:
    """A place to go on from; heaps have the likeliest first, as C++ has with ``<`` of the probabilities."""

    prob: float
    node: Node | Leaf
    edge: Sequence[int]
    offset: int
    depth: int  #: tokens above the edge
    parent: int

    def __lt__(self, other: _Fork) -> bool:
        return self.prob > other.prob


def _tree(tree: SuffixTree, node: Node | Leaf, offset: int, depth: int, most: int, floor: float) -> Draft:
    """The ``most`` likeliest nodes below a path."""
    ids: list[int] = []
    parents: list[int] = []
    probs: list[float] = []
    score = 0.0
    edge = tree.run(node, depth - offset)
    heap = [_Fork(1.0, node, edge, offset, depth - offset, -1)]
    while heap and len(ids) < most:
        fork = heapq.heappop(heap)
        if fork.offset < len(fork.edge):
            ids.append(fork.edge[fork.offset])
            parents.append(fork.parent)
            probs.append(fork.prob)
            score = float32(score + fork.prob)
            fork.offset += 1
            fork.parent = len(ids) - 1
            heapq.heappush(heap, fork)
        elif isinstance(fork.node, Node):
            below = fork.depth + len(fork.edge)
            for token in fork.node.ranked():
                child = fork.node.children[token]
                prob = float32(float32(fork.prob * count_of(child)) / fork.node.count)
                if prob < floor:
                    break
                heapq.heappush(heap, _Fork(prob, child, tree.run(child, below), 0, below, fork.parent))
    return Draft(ids, parents, probs, score)
