"""How many nodes a draft tree is worth, where nobody said it: by what the target's steps cost on this device.

Each node is one more token that the target computes. What it gains falls from node to node, and what it costs
depends on the device: next to nothing while a GPU is busy reading weights, most of a step on a CPU.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from ..contract import CostCurve

#: Most nodes that are considered: buffers are made for as many before any step could be timed.
MOST_NODES = 48
#: What is supposed of a head before it has drafted anything: the chance of its best token, and how those of
#: the next ones fall, as a power of their rank. Ten children hold 0.93 together.
FIRST, FALL = 0.7, 2.5


def expected_gains(
    fanout: int, depth: int, count: int, *, first: float = FIRST, fall: float = FALL
) -> list[float]:
    """The chances of acceptance of the best ``count`` nodes of a tree, the best first; fewer if there are.

    Args:
        fanout: children of a node.
        depth: levels.
        first: chance of a node's first child, given the node.
        fall: the child of rank ``r``, from 1, has the chance ``first * r ** -fall``.
    """
    children = [first * rank**-fall for rank in range(1, fanout + 1)]
    open_nodes = [(-chance, 1) for chance in children]
    heapq.heapify(open_nodes)
    gains: list[float] = []
    while open_nodes and len(gains) < count:
        negative, level = heapq.heappop(open_nodes)
        gains.append(-negative)
        if level < depth:
            for chance in children:
                heapq.heappush(open_nodes, (negative * chance, level + 1))
    return gains


def choose_nodes(costs: Callable[[Sequence[tuple[int, int]]], CostCurve], gains: Sequence[float]) -> int:
    """How many nodes make one request fastest, at least 1.

    What drafting itself costs is left out: of a tree that is grown and then cut it does not depend on the
    number that is kept.

    Args:
        costs: :attr:`~specdecode.contract.Resources.costs`.
        gains: as of :func:`expected_gains`.
    """
    return max(1, costs(_sizes(1 + len(gains))).best(1, gains))


def _sizes(most: int) -> list[tuple[int, int]]:
    """Steps of one row to be measured: the powers of two up to ``most`` tokens, and ``most``."""
    return [*((1, 1 << power) for power in range((most - 1).bit_length())), (1, most)]
