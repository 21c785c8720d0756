"""A suffix tree of bounded depth over texts that grow, end and are forgotten.

Every stretch of at most ``depth`` tokens of every text is a path from the root, and a node counts how
often its path occurs (Oliaro et al., arXiv 2411.04975). Children are kept in the order of their counts, and
of equals in the order that arctic-inference's tree keeps: what is drafted depends on it.

Three things keep a tree small and quick in Python. A path that occurs once is a number, no object: text and
place where its last edge begins; it grows with its text (Ukkonen's leaves). So a new token costs work for
those suffixes only that occurred before: two or three in ordinary text. And an edge owns its tokens, so
that forgetting a text never has to find another one to read them from.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

#: A leaf is ``(text << _SHIFT) | place``: where the first token of its edge stands.
_SHIFT = 32
_PLACE = (1 << _SHIFT) - 1

Leaf = int


class Node:
    """The end of a path that occurs more than once, or did."""

    __slots__ = ("children", "count", "edge", "order", "parent")

    def __init__(self, edge: tuple[int, ...], count: int, parent: Node | None) -> None:
        self.edge = edge  #: tokens from the parent to here
        self.count = count
        self.parent = parent
        self.children: dict[int, Node | Leaf] = {}  #: by the first token of their edge
        self.order: list[int] | None = None  #: their first tokens, largest count first; None below two

    def ranked(self) -> Iterable[int]:
        """First tokens of the children, largest count first."""
        return self.children if self.order is None else self.order


def count_of(child: Node | Leaf) -> int:
    return 1 if type(child) is int else child.count  # type: ignore[union-attr]


class SuffixTree:
    """Counts of all stretches of up to ``depth`` tokens of its texts.

    Args:
        depth: most tokens of a path: those matched and those drafted behind them.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.root = Node((), 0, None)
        self._texts: dict[int, array[int]] = {}
        #: For each text that may grow, by length - 1, where its suffixes end that occur more than once.
        self._ends: dict[int, list[Node | None]] = {}

    @property
    def num_texts(self) -> int:
        return len(self._texts)

    def text(self, key: int) -> array[int]:
        """The tokens of a text, not to be written."""
        return self._texts[key]

    def ends(self, key: int) -> Sequence[Node | None]:
        """Where the suffixes of 1, 2, ... tokens of a growing text end; longer ones occur once."""
        return self._ends.get(key, ())

    def run(self, spot: Node | Leaf, depth: int) -> Sequence[int]:
        """The tokens of the edge to ``spot``, which begins ``depth`` tokens below the root."""
        if isinstance(spot, Node):
            return spot.edge
        text, place = self._texts[spot >> _SHIFT], spot & _PLACE
        return text[place : place + self.depth - depth]

    # -- growing ----------------------------------------------------------------------------------
    def extend(self, key: int, tokens: Iterable[int]) -> None:
        """Append to the text ``key``, which begins with its first tokens."""
        text = self._texts.setdefault(key, array("i"))
        self._ends.setdefault(key, [])
        for token in tokens:
            text.append(token)
            self._append(key, token, len(text) - 1)

    def close(self, key: int) -> None:
        """The text will not grow any more."""
        self._ends.pop(key, None)

    def _append(self, key: int, token: int, place: int) -> None:
        """Lengthen each suffix by ``token``, the longest first."""
        ends, longest = self._ends[key], self.depth - 1
        # By new length - 1. Of a suffix that now occurs for the first time a leaf takes care.
        grown: list[Node | None] = [None] * (len(ends) + 1)
        for length in range(len(ends), 0, -1):
            node = ends[length - 1]
            if node is not None:
                grown[length] = self._step(key, node, length, token, place)
        self.root.count += 1
        grown[0] = self._descend(key, self.root, 0, token, place)
        del grown[longest:]
        while grown and grown[-1] is None:
            grown.pop()
        self._ends[key] = grown

    def _step(self, key: int, node: Node, length: int, token: int, place: int) -> Node | None:
        """Move the suffix of ``length`` tokens that ends at ``node`` on to ``token``."""
        child = node.children.get(token)
        if child is None:
            if node.count == 1:  # nothing else passes here: the edge itself grows
                node.edge += (token,)
                return node
        elif node.count == count_of(child) + 1:  # all that passes here goes on there, and so does this
            return self._along(node, child, length, token)
        return self._descend(key, node, length, token, place)

    def _along(self, node: Node, child: Node | Leaf, length: int, token: int) -> Node:
        """The node's end moves a token along the edge of its only child."""
        node.children, node.order = {}, None
        if isinstance(child, Node):
            if len(child.edge) == 1:  # it arrives: others may end at the child, so the child stays
                child.count += 1
                child.edge = node.edge + child.edge
                self._put(node, child)
                return child
            child.edge = child.edge[1:]
            node.children[child.edge[0]] = child
        else:
            text, following = self._texts[child >> _SHIFT], (child & _PLACE) + 1
            if length + 1 == self.depth or following == len(text):
                self._wake(child >> _SHIFT, length + 1, node)
            else:
                node.children[text[following]] = child + 1
        node.edge += (token,)
        return node

    def _descend(self, key: int, node: Node, length: int, token: int, place: int) -> Node | None:
        """Leave ``node`` for its child under ``token``, which is made, or cut short, where need be."""
        children = node.children
        child = children.get(token)
        if child is None:
            if children and node is not self.root:
                if node.order is None:
                    node.order = list(children)
                node.order.append(token)
            children[token] = key << _SHIFT | place
            return None
        if not isinstance(child, Node):
            count, new = 1, Node((token,), 2, node)
            text, following = self._texts[child >> _SHIFT], (child & _PLACE) + 1
            if length + 1 == self.depth or following == len(text):
                self._wake(child >> _SHIFT, length + 1, new)
            else:
                new.children[text[following]] = child + 1
            children[token] = new
        elif len(child.edge) == 1:
            count, new = child.count, child
            child.count += 1
        else:
            count, new = child.count, Node((token,), child.count + 1, node)
            child.edge, child.parent = child.edge[1:], new
            new.children[child.edge[0]] = child
            children[token] = new
        if node.order is not None:
            _promote(node, node.order, token, count)
        return new

    def _wake(self, key: int, length: int, node: Node) -> None:
        """Another text has come to where ``key`` ends: its suffix is a leaf no longer."""
        ends = self._ends.get(key)
        if ends is None or length >= self.depth:
            return
        ends.extend([None] * (length - len(ends)))
        ends[length - 1] = node

    def _put(self, node: Node, child: Node) -> None:
        """``child`` takes the place of ``node``, whose edge its own begins with."""
        parent = node.parent
        assert parent is not None
        parent.children[node.edge[0]] = child
        child.parent = parent

    # -- forgetting -------------------------------------------------------------------------------
    def remove(self, key: int) -> None:
        """Forget a text."""
        text = self._texts[key]
        self._ends.pop(key, None)
        end = len(text)
        for start in range(end):
            node, place = self.root, start
            node.count -= 1
            while place < end:
                token = text[place]
                child = node.children.get(token)
                if child is None:  # the depth ends the path
                    break
                if not isinstance(child, Node) or child.count == 1:
                    _drop(node, token)
                    break
                if node.order is not None:
                    _demote(node, node.order, token, child.count)
                child.count -= 1
                node, place = child, place + len(child.edge)
            self._merge(node)
        del self._texts[key]

    def _merge(self, node: Node) -> None:
        """A node that all leave for one child is no end of a path: its edge becomes part of the child's."""
        if node is self.root or len(node.children) != 1:
            return
        (child,) = node.children.values()
        if count_of(child) != node.count:
            return
        if isinstance(child, Node):
            child.edge = node.edge + child.edge
            self._put(node, child)
        else:
            assert node.parent is not None
            node.parent.children[node.edge[0]] = child - len(node.edge)

    # -- finding ----------------------------------------------------------------------------------
    def find(self, path: tuple[int, ...]) -> tuple[Node | Leaf, int] | None:
        """Where ``path`` ends, and how far into the edge; None if it does not occur."""
        node, place, end = self.root, 0, len(path)
        while place < end:
            child = node.children.get(path[place])
            if child is None:
                return None
            edge = self.run(child, place)
            if not isinstance(child, Node):
                edge = tuple(edge)
            rest = end - place
            if len(edge) >= rest:
                return (child, rest) if edge[:rest] == path[place:] else None
            if not isinstance(child, Node) or edge != path[place : place + len(edge)]:
                return None
            node, place = child, place + len(edge)
        return node, len(node.edge)


def _promote(node: Node, order: list[int], token: int, count: int) -> None:
    """The child under ``token``, once counted ``count`` times, was counted again.

    It goes before the first of those that are counted like its neighbour: so does arctic-inference, whose
    newcomers of a count come last, but first if they led those of the count before.
    """
    if order[0] == token:
        return
    children, place = node.children, order.index(token)
    before = count_of(children[order[place - 1]])
    if before <= count + 1:
        del order[place]
        order.insert(bisect_left(order, -before, 0, place, key=lambda t: -count_of(children[t])), token)


def _demote(node: Node, order: list[int], token: int, count: int) -> None:
    """The child under ``token``, still counted ``count`` times, will lose one: first of those with fewer."""
    children, place = node.children, order.index(token)
    behind = bisect_right(order, -count, place + 1, key=lambda t: -count_of(children[t]))
    order.insert(behind, token)
    del order[place]


def _drop(node: Node, token: int) -> None:
    del node.children[token]
    if node.order is not None:
        node.order.remove(token)
        if len(node.order) == 1:
            node.order = None
