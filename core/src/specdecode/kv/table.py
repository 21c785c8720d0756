"""The blocks of one request. Knows tokens and blocks, no tensors."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from .keys import BlockKeys, ContentMark
from .pool import NULL_BLOCK, BlockPool


@attrs.frozen
class PrefixHit:
    """What the prefix cache had: ``tokens`` with target KV, of them ``drafted`` with draft layers too."""

    tokens: int = 0
    drafted: int = 0


class BlockTable:
    """Blocks in the order of the tokens they hold; logical slot ``j`` is in ``blocks[j // block_size]``."""

    def __init__(
        self, pool: BlockPool, namespace: str, expect: int = 0, marks: Sequence[ContentMark] = ()
    ) -> None:
        """``expect``: how many slots it may come to; ``marks``: what its tokens' ids do not tell."""
        self.blocks: list[int] = []
        self._pool = pool
        self._expect = max(1, -(-expect // pool.block_size))
        self._keys = BlockKeys(namespace, pool.block_size, marks)
        self._shared = 0  # leading blocks taken from the prefix cache
        self._settled = 0  # leading blocks that publish need not look at again
        self._offered = 0  # leading blocks that it need not before their draft layers are written

    @property
    def capacity(self) -> int:
        """Slots there are blocks for."""
        return len(self.blocks) * self._pool.block_size

    def ensure(self, num_slots: int) -> None:
        """Have blocks for ``num_slots`` slots; raises ``PoolExhausted``, keeping what it got."""
        while self.capacity < num_slots:
            last = self.blocks[-1] if self.blocks else NULL_BLOCK
            self.blocks.append(self._pool.allocate(last, self._expect))

    def trim(self, num_slots: int) -> bool:
        """Give back blocks beyond ``num_slots`` slots; True if there were any."""
        keep = max(-(-num_slots // self._pool.block_size), self._shared)
        surplus = self.blocks[keep:]
        del self.blocks[keep:]
        for block in reversed(surplus):
            self._pool.release(block)
        return bool(surplus)

    def take_prefix(self, token_ids: Sequence[int], *, drafted_only: bool) -> PrefixHit:
        """Hold the longest published prefix of ``token_ids`` in full blocks.

        ``drafted_only``: end it at the first block without draft layers.
        """
        pool, size = self._pool, self._pool.block_size
        drafted = 0
        for index in range(len(token_ids) // size):
            block = pool.lookup(self._keys.key(index, token_ids))
            if block is None or (drafted_only and not pool.drafted(block)):
                break
            if pool.drafted(block) and drafted == index:
                drafted += 1
            pool.hold(block)
            self.blocks.append(block)
        self._shared = len(self.blocks)
        self._settled = drafted
        return PrefixHit(len(self.blocks) * size, drafted * size)

    @property
    def drafted_slots(self) -> int:
        """Slots of the leading blocks whose draft layers are written and published, by whomever."""
        count = 0
        for block in self.blocks:
            if not self._pool.drafted(block):
                break
            count += 1
        return count * self._pool.block_size

    def publish(self, token_ids: Sequence[int], computed: int, drafted: int | None) -> None:
        """Publish the full blocks of the first ``computed`` tokens.

        ``drafted``: how many entries of the draft layers are true; None if there are no such layers.
        """
        size = self._pool.block_size
        more = drafted is not None and drafted >= (self._settled + 1) * size
        first = self._settled if more else max(self._settled, self._offered)
        for index in range(first, computed // size):
            written = drafted is not None and drafted >= (index + 1) * size
            self._pool.publish(self.blocks[index], self._keys.key(index, token_ids), drafted=written)
            if self._settled == index and (written or drafted is None):
                self._settled += 1
        self._offered = max(self._offered, computed // size)

    def release(self) -> None:
        """Give all blocks back, the last first, so that a prefix outlives its continuation."""
        for block in reversed(self.blocks):
            self._pool.release(block)
        self.blocks = []
        self._shared = self._settled = self._offered = 0
