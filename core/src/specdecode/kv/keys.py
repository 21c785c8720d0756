"""Content keys of full blocks: a block's key covers every token up to its end, and the namespace."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import attrs


@attrs.frozen
class ContentMark:
    """Tokens ``start..stop-1`` stand for something that their ids do not tell, such as an image."""

    start: int
    stop: int
    key: bytes  #: hash of it


class BlockKeys:
    """The keys of one token sequence, computed as it grows."""

    def __init__(self, namespace: str, block_size: int, marks: Sequence[ContentMark] = ()) -> None:
        self._marks = marks
        self._block_size = block_size
        self._root = hashlib.blake2b(namespace.encode(), digest_size=16).digest()
        self._keys: list[bytes] = []

    def key(self, index: int, token_ids: Sequence[int]) -> bytes:
        """Key of block ``index``; ``token_ids`` must hold all tokens up to its end."""
        size = self._block_size
        while len(self._keys) <= index:
            start = len(self._keys) * size
            digest = hashlib.blake2b(self._keys[-1] if self._keys else self._root, digest_size=16)
            digest.update(array("q", token_ids[start : start + size]).tobytes())
            for mark in self._marks:
                if mark.start < start + size and mark.stop > start:  # the block may begin anywhere in it
                    digest.update(mark.key + array("q", [start - mark.start]).tobytes())
            self._keys.append(digest.digest())
        return self._keys[index]
