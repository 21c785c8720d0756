"""Outputs that are remembered: each in its namespace, all together within bounds."""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections import deque
from collections.abc import Callable, Sequence

import attrs

from .cache import Cache
from .drafting import Draft, Limits

#: What stands for a namespace, here and in files: cache salts and API keys are secrets.
DIGEST_BYTES = 16


def digest(namespace: str) -> bytes:
    return hashlib.blake2b(namespace.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()


@attrs.frozen
class Output:
    """What one request of a namespace wrote."""

    space: bytes
    tokens: array[int]


@attrs.define(eq=False)
class _Space:
    """One namespace."""

    name: bytes
    cache: Cache
    users: int = 0  #: running requests and remembered outputs


@attrs.frozen(eq=False)
class Writer:
    """A request, running or ended."""

    space: _Space
    key: int
    tokens: array[int]  #: of its output


class Memory:
    """The outputs of requests, running and ended.

    Those that ended are forgotten oldest first, whatever their namespace, so that the bounds hold however
    many namespaces there are. A running request is never forgotten.

    Args:
        make_cache: a cache for a namespace.
        max_outputs: most outputs that are remembered once their request has ended.
        max_tokens: most tokens in them.
        shared: one namespace for all.
    """

    def __init__(
        self, make_cache: Callable[[], Cache], *, max_outputs: int, max_tokens: int, shared: bool
    ) -> None:
        self._make_cache = make_cache
        self._max_outputs, self._max_tokens = max_outputs, max_tokens
        self._remembers = max_outputs > 0 and max_tokens > 0
        self._shared = shared
        self._spaces: dict[bytes, _Space] = {}
        self._kept: deque[Writer] = deque()
        self._keys = itertools.count()
        self.num_tokens = 0  #: remembered
        self.evicted_outputs = 0
        self.evicted_tokens = 0

    @property
    def num_outputs(self) -> int:
        """Outputs remembered, of requests that ended."""
        return len(self._kept)

    @property
    def num_spaces(self) -> int:
        return len(self._spaces)

    def begin(self, namespace: str, prompt: Sequence[int]) -> Writer:
        """A request begins to write."""
        space = self._enter(digest(namespace))
        writer = Writer(space, next(self._keys), array("i"))
        space.cache.start(writer.key, prompt)
        return writer

    def extend(self, writer: Writer, tokens: Sequence[int]) -> None:
        """It wrote ``tokens``."""
        writer.tokens.extend(tokens)
        writer.space.cache.extend(writer.key, tokens)

    def speculate(self, writer: Writer, context: Sequence[int], limits: Limits) -> Draft:
        """What may follow its text, of which ``context`` is the end."""
        return writer.space.cache.speculate(writer.key, context, limits)

    def end(self, writer: Writer) -> None:
        """It ended; what it wrote is remembered, and something older perhaps forgotten."""
        writer.space.cache.stop(writer.key)
        if self._remembers:
            self._keep(writer)
        else:
            self._leave(writer.space)

    def restore(self, outputs: Sequence[Output]) -> None:
        """Remember what was saved, the oldest first."""
        for output in outputs[-self._max_outputs :] if self._remembers else ():
            writer = Writer(self._enter(output.space), next(self._keys), output.tokens)
            writer.space.cache.remember(writer.key, output.tokens)
            self._keep(writer)

    def outputs(self) -> list[Output]:
        """All that is remembered, the oldest first."""
        return [Output(kept.space.name, kept.tokens) for kept in self._kept]

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()
        self._spaces.clear()
        self.num_tokens = 0

    def _enter(self, name: bytes) -> _Space:
        name = digest("") if self._shared else name
        space = self._spaces.get(name)
        if space is None:
            space = self._spaces[name] = _Space(name, self._make_cache())
        space.users += 1
        return space

    def _keep(self, kept: Writer) -> None:
        self._kept.append(kept)
        self.num_tokens += len(kept.tokens)
        while self._kept and (len(self._kept) > self._max_outputs or self.num_tokens > self._max_tokens):
            self._forget(self._kept.popleft())

    def _forget(self, kept: Writer) -> None:
        kept.space.cache.forget(kept.key)
        self.num_tokens -= len(kept.tokens)
        self.evicted_outputs += 1
        self.evicted_tokens += len(kept.tokens)
        self._leave(kept.space)

    def _leave(self, space: _Space) -> None:
        space.users -= 1
        if not space.users:
            del self._spaces[space.name]
