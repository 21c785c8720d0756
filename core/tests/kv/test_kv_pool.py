"""The pool, its prefix cache and block tables; random lives of them are in ``tests/machines``."""

from __future__ import annotations

import pytest
from specdecode.kv import BlockPool, BlockTable, PoolExhausted
from specdecode.kv.table import PrefixHit

SIZE = 4


def table_of(
    pool: BlockPool, tokens: list[int], *, drafted: int | None = None, namespace: str = ""
) -> BlockTable:
    """A table whose ``tokens`` are computed and published."""
    table = BlockTable(pool, namespace)
    table.ensure(len(tokens))
    table.publish(tokens, len(tokens), drafted)
    return table


def test_a_prefix_is_found_in_full_blocks_only():
    pool = BlockPool(8, SIZE)
    table_of(pool, list(range(10)))
    hit = BlockTable(pool, "").take_prefix(list(range(10)), drafted_only=False)
    assert hit == PrefixHit(tokens=8, drafted=0)


def test_a_prefix_of_another_namespace_or_another_start_is_not_found():
    pool = BlockPool(8, SIZE)
    table_of(pool, list(range(8)))
    assert not BlockTable(pool, "tenant").take_prefix(list(range(8)), drafted_only=False).tokens
    assert not BlockTable(pool, "").take_prefix([9, *range(1, 8)], drafted_only=False).tokens
    # the second block's tokens alone do not make its key: what came before does
    assert not BlockTable(pool, "").take_prefix([4, 5, 6, 7], drafted_only=False).tokens


def test_a_tapped_hit_ends_at_the_first_block_without_draft_layers():
    pool = BlockPool(8, SIZE)
    table_of(pool, list(range(12)), drafted=8)
    assert BlockTable(pool, "").take_prefix(list(range(12)), drafted_only=True) == PrefixHit(8, 8)
    assert BlockTable(pool, "").take_prefix(list(range(12)), drafted_only=False) == PrefixHit(12, 8)


def test_catching_up_sets_the_bit_of_a_published_block():
    pool = BlockPool(8, SIZE)
    table = table_of(pool, list(range(8)), drafted=0)
    assert BlockTable(pool, "").take_prefix(list(range(8)), drafted_only=True).tokens == 0
    table.publish(list(range(8)), 8, 8)
    assert BlockTable(pool, "").take_prefix(list(range(8)), drafted_only=True).tokens == 8


def test_a_block_with_draft_layers_replaces_one_without():
    pool = BlockPool(8, SIZE)
    table_of(pool, list(range(4)), drafted=0)
    better = table_of(pool, list(range(4)), drafted=4)
    other = BlockTable(pool, "")
    other.take_prefix(list(range(4)), drafted_only=False)
    assert other.blocks == better.blocks
    worse = table_of(pool, list(range(4)), drafted=0)
    assert worse.blocks != better.blocks
    again = BlockTable(pool, "")
    again.take_prefix(list(range(4)), drafted_only=False)
    assert again.blocks == better.blocks


def test_released_prefixes_stay_until_their_blocks_are_wanted_oldest_first():
    pool = BlockPool(4, SIZE)
    first, second = table_of(pool, [1] * 8), table_of(pool, [2] * 8)
    first.release()
    second.release()
    assert pool.num_free == 4
    BlockTable(pool, "").ensure(SIZE)  # evicts the end of the first
    assert BlockTable(pool, "").take_prefix([1] * 8, drafted_only=False).tokens == 4
    assert BlockTable(pool, "").take_prefix([2] * 8, drafted_only=False).tokens == 8


def test_tables_grow_into_neighbouring_blocks_side_by_side():
    pool = BlockPool(16, SIZE)
    first, second = BlockTable(pool, "", expect=5 * SIZE), BlockTable(pool, "", expect=5 * SIZE)
    for length in range(1, 5 * SIZE + 1):
        first.ensure(length)
        second.ensure(length)
    assert first.blocks == [1, 2, 3, 4, 5] and second.blocks == [6, 7, 8, 9, 10]


def test_trim_keeps_what_is_asked_for_and_what_is_shared():
    pool = BlockPool(8, SIZE)
    table_of(pool, list(range(8)))
    table = BlockTable(pool, "")
    table.take_prefix(list(range(8)), drafted_only=False)
    table.ensure(20)
    assert table.trim(9) and len(table.blocks) == 3
    assert not table.trim(9)
    assert table.trim(1) and len(table.blocks) == 2  # the two of the hit


def test_exhaustion_keeps_what_was_got():
    pool = BlockPool(2, SIZE)
    table = BlockTable(pool, "")
    with pytest.raises(PoolExhausted, match="2 KV blocks"):
        table.ensure(12)
    assert table.capacity == 8
    table.release()
    assert pool.num_free == 2


def test_writes_into_shared_or_published_blocks_are_known():
    pool = BlockPool(4, SIZE)
    own = BlockTable(pool, "")
    own.ensure(4)
    assert pool.may_write_target(own.blocks[0]) and pool.may_write_target(0)
    own.publish([1, 2, 3, 4], 4, 0)
    assert not pool.may_write_target(own.blocks[0])
    assert pool.may_write_draft(own.blocks[0])
    own.publish([1, 2, 3, 4], 4, 4)
    assert not pool.may_write_draft(own.blocks[0])


def test_reset_is_refused_while_blocks_are_held():
    pool = BlockPool(4, SIZE)
    table = table_of(pool, [1, 2, 3, 4])
    assert not pool.reset_cache()
    table.release()
    assert pool.reset_cache()
    assert not BlockTable(pool, "").take_prefix([1, 2, 3, 4], drafted_only=False).tokens
