"""The pool of KV blocks and the prefix cache over them. Knows no requests and no tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from types import MappingProxyType

from ..contract import SpecdecodeError

#: Writes that must not be kept go here; it is never allocated.
NULL_BLOCK = 0


class PoolExhausted(SpecdecodeError):
    """No block is free and none in the prefix cache can be evicted."""


class BlockPool:
    """``num_blocks`` blocks of ``block_size`` slots, and a null block beside them.

    A block is *held* by one or more tables, or free. A free block that is *published* under a
    content key keeps its KV until it is allocated again, oldest first; free blocks without content
    go first. A published block also carries the bit *drafted*: its draft layers are written too.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))
        self._holders = [0] * (num_blocks + 1)
        self._key: list[bytes | None] = [None] * (num_blocks + 1)
        self._drafted = [False] * (num_blocks + 1)
        self._by_key: dict[bytes, int] = {}
        self._cursor = 1  # where the next table may start

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated, published ones included."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Fraction of blocks held by requests."""
        return 1 - self.num_free / self.num_blocks if self.num_blocks else 0.0

    def allocate(self, after: int = NULL_BLOCK, expect: int = 1) -> int:
        """A block held once, without content.

        Args:
            after: the table's last block, whose neighbour is taken if it is free and without content:
                attention reads a row of neighbouring blocks in place.
            expect: for a table's first block, how many it may come to; the next table starts beyond.

        Raises:
            PoolExhausted: no block is free.
        """
        if not self._free:
            raise PoolExhausted(f"all {self.num_blocks} KV blocks are held")
        block = after + 1 if after else self._cursor
        if block in self._free and self._key[block] is None:
            del self._free[block]
        else:
            block, _ = self._free.popitem(last=False)
        if not after:
            self._cursor = block + expect if block + expect <= self.num_blocks else 1
        self._unpublish(block)
        self._holders[block] = 1
        return block

    def hold(self, block: int) -> None:
        """Hold a published block once more.

        Raises:
            AssertionError: it is not published, so nobody knows what is in it.
        """
        assert self._key[block] is not None, f"block {block} is not published"
        if self._holders[block] == 0:
            del self._free[block]
        self._holders[block] += 1

    def release(self, block: int) -> None:
        """Let go of one hold.

        Raises:
            AssertionError: nobody holds it.
        """
        assert self._holders[block] > 0, f"block {block} is free and cannot be released again"
        self._holders[block] -= 1
        if self._holders[block] == 0:
            self._free[block] = None
            if self._key[block] is None:
                self._free.move_to_end(block, last=False)

    # -- prefix cache ---------------------------------------------------------------------------
    def lookup(self, key: bytes) -> int | None:
        """The block published under ``key``."""
        return self._by_key.get(key)

    def drafted(self, block: int) -> bool:
        """Whether the block's draft layers are written."""
        return self._drafted[block]

    def publish(self, block: int, key: bytes, *, drafted: bool) -> None:
        """Offer a full block of committed tokens to later requests.

        Of two blocks with one key the first stays published, unless only the second is drafted.
        """
        known = self._by_key.get(key)
        if known == block:
            self._drafted[block] |= drafted
            return
        if known is not None:
            if self._drafted[known] or not drafted:
                return
            self._unpublish(known)
        self._by_key[key] = block
        self._key[block] = key
        self._drafted[block] = drafted

    def reset_cache(self) -> bool:
        """Forget all published blocks; refused (False) while a request holds any block."""
        if self.num_free < self.num_blocks:
            return False
        for block in list(self._by_key.values()):
            self._unpublish(block)
        return True

    def _unpublish(self, block: int) -> None:
        key = self._key[block]
        if key is not None:
            del self._by_key[key]
            self._key[block] = None
            if block in self._free:
                self._free.move_to_end(block, last=False)
        self._drafted[block] = False

    # -- integrity ------------------------------------------------------------------------------
    @property
    def published(self) -> Mapping[bytes, int]:
        """Key -> block, of all that is in the prefix cache."""
        return MappingProxyType(self._by_key)

    def may_be_allocated(self, block: int) -> bool:
        """Whether nobody holds it."""
        return block in self._free

    def may_write_target(self, block: int) -> bool:
        """Whether the target may write into ``block``: held once and not published, or the null block."""
        return block == NULL_BLOCK or (self._holders[block] == 1 and self._key[block] is None)

    def may_write_draft(self, block: int) -> bool:
        """Whether draft layers may: also a published block that lacks them."""
        return block == NULL_BLOCK or self._key[block] is None or not self._drafted[block]

    def check(self, held: list[int] | None = None) -> None:
        """Raise AssertionError if the books do not balance; ``held``: every hold there should be."""
        for block in range(1, self.num_blocks + 1):
            assert (self._holders[block] == 0) == (block in self._free), f"block {block} is free and held"
            key = self._key[block]
            assert key is None or self._by_key[key] == block, (
                f"block {block} is published under another's key"
            )
        assert NULL_BLOCK not in self._free and NULL_BLOCK not in self._by_key.values()
        if held is not None:
            counts = [0] * (self.num_blocks + 1)
            for block in held:
                counts[block] += 1
            assert counts == self._holders, "holds and tables differ"
