"""Block pool, tables and prefix cache against a memory that knows what every slot holds."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from specdecode.kv import BlockPool, BlockTable, PoolExhausted
from specdecode.kv.keys import BlockKeys

SIZE = 4
BLOCKS = 9

#: What a slot holds: namespace and all tokens up to its own; None is garbage.
Content = tuple[str, tuple[int, ...]] | None


@attrs.define(eq=False)
class Row:
    """A request as the pool sees it."""

    namespace: str
    tokens: list[int]
    table: BlockTable
    computed: int  # tokens with target KV
    own: int  # true draft entries

    def content(self, slot: int) -> Content:
        return self.namespace, tuple(self.tokens[: slot + 1])


class Memory:
    """Target and draft layers of all blocks."""

    def __init__(self) -> None:
        self.target: list[list[Content]] = [[None] * SIZE for _ in range(BLOCKS + 1)]
        self.draft: list[list[Content]] = [[None] * SIZE for _ in range(BLOCKS + 1)]


class PoolMachine(RuleBasedStateMachine):
    """Rows are admitted, computed, drafted for, published and released as the engine does it."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS, SIZE)
        self.memory = Memory()
        self.rows: list[Row] = []
        self.contents: dict[bytes, Content] = {}
        self.clock = 0
        self.released: dict[int, int] = {}  # published block -> when its last holder let go
        self._release, self._allocate = self.pool.release, self.pool.allocate
        self.pool.release = self.watched_release
        self.pool.allocate = self.watched_allocate

    # -- what the pool is held to ---------------------------------------------------------------
    def holders(self, block: int) -> int:
        return sum(row.table.blocks.count(block) for row in self.rows)

    def watched_release(self, block: int) -> None:
        self._release(block)
        self.clock += 1
        self.released[block] = self.clock

    def watched_allocate(self, *where: int) -> int:
        published = set(self.pool.published.values())
        free = {block for block in range(1, BLOCKS + 1) if self.pool.may_be_allocated(block)}
        if not free:
            with pytest.raises(PoolExhausted):
                self._allocate(*where)
            raise PoolExhausted
        block = self._allocate(*where)
        assert block in free, "a block that is held was given away"
        if free - published:
            assert block not in published, "something was evicted although there was an empty block"
        else:
            assert block == min(free, key=self.released.__getitem__), "not the one released first"
        return block

    # -- life of a row --------------------------------------------------------------------------
    @initialize(drafting=st.sampled_from(("none", "ids", "taps")))
    def configure(self, drafting):
        self.drafting = drafting

    @precondition(lambda self: len(self.rows) < 4)
    @rule(
        namespace=st.sampled_from(("", "", "", "tenant")),
        text=st.integers(0, 1),
        length=st.sampled_from((8, 12, 13, 3, 17)),
        whole=st.booleans(),
    )
    def admit(self, namespace, text, length, whole):
        """A row takes its prefix; if ``whole``, it is computed, fed and published at once."""
        tokens = [(place + text) % 3 for place in range(length)]
        table = BlockTable(self.pool, namespace, expect=len(tokens) + 4)
        longest = 0
        keys = BlockKeys(namespace, SIZE)
        while (longest + 1) * SIZE <= len(tokens):
            block = self.pool.lookup(keys.key(longest, tokens))
            if block is None or (self.drafting == "taps" and not self.pool.drafted(block)):
                break
            longest += 1
        hit = table.take_prefix(tokens, drafted_only=self.drafting == "taps")
        assert hit.tokens == longest * SIZE, "not the longest prefix there is"
        assert hit.drafted <= hit.tokens and (self.drafting != "taps" or hit.drafted == hit.tokens)
        row = Row(namespace, list(tokens), table, hit.tokens, hit.drafted)
        for slot in range(hit.tokens):
            assert self.read(self.memory.target, row, slot) == row.content(slot), "another text's KV"
        for slot in range(hit.drafted):
            assert self.read(self.memory.draft, row, slot) == row.content(slot), "another text's entries"
        self.rows.append(row)
        self.grow(len(self.rows) - 1, [])
        if whole and row in self.rows:
            which = self.rows.index(row)
            self.compute(which, length)
            if self.drafting != "none":
                self.feed(which, length)
            self.publish(which)

    @precondition(lambda self: self.rows)
    @rule(which=st.integers(0, 3), tokens=st.lists(st.integers(0, 1), max_size=3))
    def grow(self, which, tokens):
        """Tokens are committed, and get their slots or the row is thrown out."""
        row = self.row(which)
        row.tokens += tokens
        try:
            row.table.ensure(len(row.tokens))
        except PoolExhausted:
            assert not any(self.pool.may_be_allocated(block) for block in range(1, BLOCKS + 1))
            self.release(which)

    @precondition(lambda self: self.rows)
    @rule(which=st.integers(0, 3), count=st.integers(1, 9))
    def compute(self, which, count):
        row = self.row(which)
        for slot in range(row.computed, min(row.computed + count, len(row.tokens))):
            assert self.pool.may_write_target(row.table.blocks[slot // SIZE]), "a shared block is written"
            self.write(self.memory.target, row, slot, row.content(slot))
            row.computed += 1

    @precondition(lambda self: self.rows and self.drafting != "none")
    @rule(which=st.integers(0, 3), count=st.integers(1, 9))
    def feed(self, which, count):
        """Draft entries are made, but for those that another row wrote into a block both hold."""
        row = self.row(which)
        row.own = max(row.own, min(row.table.drafted_slots, row.computed))
        for slot in range(row.own, min(row.own + count, row.computed)):
            assert self.pool.may_write_draft(row.table.blocks[slot // SIZE]), "true entries are written again"
            self.write(self.memory.draft, row, slot, row.content(slot))
            row.own += 1

    @precondition(lambda self: self.rows)
    @rule(which=st.integers(0, 3), spare=st.integers(1, 9))
    def scratch(self, which, spare):
        """Drafts are verified behind the tokens, and their slots given back."""
        row = self.row(which)
        committed = len(row.tokens)
        try:
            row.table.ensure(committed + spare)
            for slot in range(committed, committed + spare):
                assert self.pool.may_write_target(row.table.blocks[slot // SIZE])
                for layers in (self.memory.target, self.memory.draft):
                    self.write(layers, row, slot, None)
        except PoolExhausted:
            pass
        held = len(row.table.blocks)
        assert row.table.trim(committed) == (len(row.table.blocks) < held)
        assert len(row.table.blocks) == -(-committed // SIZE)

    @precondition(lambda self: self.rows)
    @rule(which=st.integers(0, 3))
    def publish(self, which):
        row = self.row(which)
        keys = BlockKeys(row.namespace, SIZE)
        for index in range(len(row.tokens) // SIZE):
            self.contents[keys.key(index, row.tokens)] = row.content((index + 1) * SIZE - 1)
        row.table.publish(row.tokens, row.computed, None if self.drafting == "none" else row.own)

    @precondition(lambda self: self.rows)
    @rule(which=st.integers(0, 3))
    def release(self, which):
        row = self.rows.pop(which % len(self.rows))
        row.table.release()
        assert not row.table.blocks

    @rule()
    def reset(self):
        assert self.pool.reset_cache() == (not any(row.table.blocks for row in self.rows))

    @rule(block=st.integers(1, BLOCKS))
    def misuse(self, block):
        """Letting go of what nobody holds, or holding what nobody knows, is refused and changes nothing."""
        if not self.holders(block):
            with pytest.raises(AssertionError, match=f"block {block}"):
                self._release(block)
        if block not in self.pool.published.values():
            with pytest.raises(AssertionError, match=f"block {block}"):
                self.pool.hold(block)

    # -- helpers --------------------------------------------------------------------------------
    def row(self, which: int) -> Row:
        return self.rows[which % len(self.rows)]

    def read(self, layers: list[list[Content]], row: Row, slot: int) -> Content:
        return layers[row.table.blocks[slot // SIZE]][slot % SIZE]

    def write(self, layers: list[list[Content]], row: Row, slot: int, content: Content) -> None:
        layers[row.table.blocks[slot // SIZE]][slot % SIZE] = content

    # -- what holds after every rule ------------------------------------------------------------
    @invariant()
    def books_balance(self):
        self.pool.check([block for row in self.rows for block in row.table.blocks])
        held = {block for row in self.rows for block in row.table.blocks}
        assert self.pool.num_free == BLOCKS - len(held)

    @invariant()
    def rows_read_their_own_text(self):
        for row in self.rows:
            for slot in range(row.computed):
                assert self.read(self.memory.target, row, slot) == row.content(slot)
            for slot in range(row.own):
                assert self.read(self.memory.draft, row, slot) == row.content(slot)

    @invariant()
    def published_blocks_hold_what_their_keys_say(self):
        for key, block in self.pool.published.items():
            namespace, tokens = self.contents[key]
            want = [(namespace, tokens[: len(tokens) - SIZE + 1 + place]) for place in range(SIZE)]
            assert self.memory.target[block] == want, "published before it was written"
            assert not self.pool.drafted(block) or self.memory.draft[block] == want

    def teardown(self):
        while self.rows:
            self.release(0)
        self.books_balance()
        assert self.pool.num_free == BLOCKS and self.pool.reset_cache() and not self.pool.published


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
