"""Where drafts of one namespace come from: a tree for each running request, and one for all outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .drafting import NOTHING, Draft, Limits, speculate
from .tree import SuffixTree

#: The one text of a request's own tree: its prompt and its output.
_OWN = 0


class Cache(Protocol):
    """Outputs by a number of the caller's; those of running requests grow."""

    def start(self, key: int, prompt: Sequence[int]) -> None:
        """A request begins."""

    def extend(self, key: int, tokens: Sequence[int]) -> None:
        """Its output has grown."""

    def stop(self, key: int) -> None:
        """It ended. Its output, if outputs are kept, stays until :meth:`forget`."""

    def remember(self, key: int, tokens: Sequence[int]) -> None:
        """The output of a request that ended before."""

    def forget(self, key: int) -> None:
        """Drop the output of a request that ended."""

    def speculate(self, key: int, context: Sequence[int], limits: Limits) -> Draft:
        """What may follow ``context``, the text so far of a running request."""


class PythonCache:
    """The same drafts as arctic-inference's ``SuffixDecodingCache`` for the same calls.

    Args:
        depth: most tokens matched and drafted together.
        keep: whether outputs are kept, for other requests to draft from.
    """

    def __init__(self, depth: int, keep: bool) -> None:
        self._depth = depth
        self._own: dict[int, SuffixTree] = {}
        self._outputs = SuffixTree(depth) if keep else None

    def start(self, key: int, prompt: Sequence[int]) -> None:
        self._own[key] = tree = SuffixTree(self._depth)
        tree.extend(_OWN, prompt)
        if self._outputs is not None:
            self._outputs.extend(key, ())

    def extend(self, key: int, tokens: Sequence[int]) -> None:
        self._own[key].extend(_OWN, tokens)
        if self._outputs is not None:
            self._outputs.extend(key, tokens)

    def stop(self, key: int) -> None:
        del self._own[key]
        if self._outputs is not None:
            self._outputs.close(key)

    def remember(self, key: int, tokens: Sequence[int]) -> None:
        if self._outputs is not None:
            self._outputs.extend(key, tokens)
            self._outputs.close(key)

    def forget(self, key: int) -> None:
        if self._outputs is not None:
            self._outputs.remove(key)

    def speculate(self, key: int, context: Sequence[int], limits: Limits) -> Draft:
        own = speculate(self._own[key], context, limits, _OWN)
        others = speculate(self._outputs, context, limits) if self._outputs is not None else NOTHING
        return own if own.score >= others.score else others
