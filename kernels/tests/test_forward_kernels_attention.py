"""Paged attention against a dense computation that loops over tokens."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from specdec_kernels.attention import AttentionMetadata, paged_attention, plan

torch.set_num_threads(1)
# The Triton kernel has tests of its own: the interpreter takes milliseconds a program.
pytestmark = [
    pytest.mark.usefixtures("implementation"),
    pytest.mark.parametrize("implementation", ["native", "torch"], indirect=True),
]

BLOCK = 4
BLOCKS = 400
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


class Case:
    """Rows of a paged cache; ``add`` appends one row's tokens."""

    def __init__(self, *, heads=6, kv_heads=2, k_dim=8, v_dim=8, seed=0, scattered=True, dtype=torch.float32):
        self.generator = torch.Generator().manual_seed(seed)
        self.heads, self.kv_heads, self.k_dim, self.dtype = heads, kv_heads, k_dim, dtype
        self.keys = self._randn(BLOCKS, BLOCK, kv_heads, k_dim)
        self.values = self._randn(BLOCKS, BLOCK, kv_heads, v_dim)
        order = (
            torch.randperm(BLOCKS - 1, generator=self.generator) + 1 if scattered else torch.arange(1, BLOCKS)
        )
        self.free = order.tolist()
        self.tables, self.rows, self.positions, self.base, self.extra = [], [], [], [], []

    def _randn(self, *shape):
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def add(self, base, *, positions=None, extra=None, slots=None, contiguous=False):
        count = -(-(slots or max([*base, *(e + 1 for es in extra or [] for e in es)])) // BLOCK)
        if contiguous:
            self.free.sort()
        self.tables.append([self.free.pop(0) for _ in range(count)])
        self.rows += [len(self.tables) - 1] * len(base)
        self.base += base
        self.positions += positions or [b - 1 for b in base]
        self.extra += extra or [[] for _ in base]
        return self

    def meta(self, first=0):
        width = max(map(len, self.tables))
        table = torch.tensor([t + [0] * (width - len(t)) for t in self.tables])
        extra = None
        if most := max(map(len, self.extra)):
            extra = torch.tensor([e + [-1] * (most - len(e)) for e in self.extra])
        return AttentionMetadata(
            rows=torch.tensor(self.rows),
            positions=torch.tensor(self.positions),
            write_slots=torch.zeros(len(self.rows), dtype=torch.long),
            base=torch.tensor(self.base),
            block_table=table,
            block_size=BLOCK,
            first=first,
            extra=extra,
        )

    def attend(self, query, meta, device="cpu", **options):
        """Of CPU tensors, computed on ``device``."""
        moved = {
            field.name: value.to(device) if isinstance(value, torch.Tensor) else value
            for field in dataclasses.fields(meta)
            if (value := getattr(meta, field.name)) is not None
        }
        meta = meta if device == "cpu" else AttentionMetadata(**moved)
        caches = self.keys.to(device), self.values.to(device)
        return paged_attention(query.to(device), *caches, meta, scale=0.3, **options).cpu()

    def query(self):
        return self._randn(len(self.rows), self.heads, self.k_dim)

    def dense(self, query, *, first=0, window=None):
        """Token by token, head by head, from the definition."""
        out = torch.zeros(len(self.rows), self.heads, self.values.shape[-1], dtype=torch.float64)
        for t, row in enumerate(self.rows):
            seen = {j: j for j in range(first, self.base[t])}  # slot -> position
            levels = sorted(self.extra[t])
            for rank, slot in enumerate(levels):
                seen[slot] = self.positions[t] - (len(levels) - 1 - rank)
            slots = [
                s
                for s, position in sorted(seen.items())
                if s >= first and (window is None or position > self.positions[t] - window)
            ]
            if not slots:
                continue
            physical = [self.tables[row][s // BLOCK] * BLOCK + s % BLOCK for s in slots]
            keys = self.keys.flatten(0, 1)[physical].double()
            values = self.values.flatten(0, 1)[physical].double()
            for head in range(self.heads):
                kv = head // (self.heads // self.kv_heads)
                weights = (keys[:, kv] @ query[t, head].double() * 0.3).softmax(0)
                out[t, head] = weights @ values[:, kv]
        return out

    def check(self, *, first=0, window=None, tolerance=1e-5):
        query = self.query()
        want = self.dense(query, first=first, window=window)
        for device in DEVICES:
            got = self.attend(query, self.meta(first), device, window=window)
            assert got.dtype is query.dtype
            torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


def causal(start, count):
    return list(range(start + 1, start + count + 1))


@pytest.mark.parametrize("scattered", [True, False])
@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (5, 1)])
@pytest.mark.parametrize("window", [None, 1, 3, 40])
def test_a_mixed_batch_equals_the_definition(scattered, heads, window):
    case = Case(heads=heads[0], kv_heads=heads[1], scattered=scattered)
    case.add([1]).add([37]).add(causal(9, 6)).add(causal(0, 23)).add(causal(30, 70)).add(
        [12], contiguous=True
    )
    case.check(window=window)


@pytest.mark.parametrize("window", [None, 90, 600])
@pytest.mark.parametrize("start", [0, 133])
def test_a_long_chunk_is_cut_into_tiles(window, start):
    Case(heads=4, kv_heads=2).add(causal(start, 530)).add([7]).check(window=window)


@pytest.mark.parametrize("count", [2, 31, 32, 33, 63, 64, 65, 66, 97, 128, 129, 193, 256, 257, 321])
@pytest.mark.parametrize("heads", [(4, 2), (2, 2), (6, 2)])
def test_every_number_of_queries(count, heads):
    Case(heads=heads[0], kv_heads=heads[1], seed=count).add(causal(20, count)).check()


def test_slots_below_the_first_are_masked():
    case = Case().add(causal(0, 5)).add([1]).add([9])
    case.check(first=1)


def test_a_token_that_sees_nothing_gives_zero_even_beside_nan():
    case = Case().add([0, 0], slots=8).add(causal(4, 3)).add([0], slots=4)
    case.keys[case.tables[0][0]] = float("nan")
    case.values[0] = float("nan")
    query = case.query()
    for device in DEVICES:
        got = case.attend(query, case.meta(), device)
        assert got[[0, 1, 5]].eq(0).all()
        assert got.isfinite().all()


def test_a_batch_in_which_nobody_sees_anything():
    case = Case().add([0, 0, 0], slots=4)
    assert case.attend(case.query(), case.meta()).eq(0).all()


def test_an_empty_batch():
    case = Case().add([3])
    meta = case.meta()
    for name in ("rows", "positions", "write_slots", "base"):
        setattr(meta, name, getattr(meta, name)[:0])
    assert paged_attention(case.query()[:0], case.keys, case.values, meta, scale=0.3).shape == (0, 6, 8)


# A tree of six nodes below a row of 10 committed tokens: parents -1 -1 0 0 1 3, node i in slot 10 + i.
TREE = [[], [10], [11], [10, 12], [10, 13], [11, 14], [10, 13, 15]]
DEPTH = [0, 1, 1, 2, 2, 2, 3]


@pytest.mark.parametrize("window", [None, 2, 3, 12])
def test_a_tree_sees_its_ancestors_only(window):
    case = Case().add([10] * 7, extra=TREE, positions=[9 + d for d in DEPTH]).add(causal(3, 4)).add([5])
    case.check(window=window)


def test_a_single_node_with_a_gap_between_its_ancestors():
    case = Case().add([10], extra=[[10, 13, 15]], positions=[12])
    case.check()
    Case().add([10], extra=[[10, 11]], positions=[11]).check()
    Case().add([0], extra=[[0, 1]], positions=[1]).check(first=1)


@pytest.mark.parametrize("seed", range(30))
def test_random_batches_equal_the_definition(seed):
    pick = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return int(torch.randint(low, high, (1,), generator=pick))

    case = Case(heads=4, kv_heads=2, seed=seed, scattered=draw(0, 2) == 1)
    for _ in range(draw(1, 6)):
        start = draw(0, 60)
        if draw(0, 3) == 0:
            levels, extra = draw(1, 5), [[]]
            for level in range(levels):
                extra.append([start + draw(0, 3) + 4 * i for i in range(level + 1)])
            case.add(
                [start] * len(extra),
                extra=extra,
                positions=[start - 1 + len(e) for e in extra],
                slots=start + 40,
            )
        else:
            case.add(causal(start, draw(1, 90)), contiguous=draw(0, 2) == 1)
    case.check(first=draw(0, 2), window=None if draw(0, 2) else draw(1, 70))


def test_keys_and_values_may_differ_in_size():
    Case(k_dim=8, v_dim=12).add(causal(20, 3)).add(causal(0, 80)).check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_rounds_the_result_only(dtype):
    case = Case(dtype=dtype).add(causal(100, 6)).add([77]).add(causal(0, 120))
    case.check(tolerance=2e-2 if dtype is torch.bfloat16 else 3e-3)


def test_memory_bounds_change_nothing(monkeypatch):
    def build():
        case = Case(heads=4, kv_heads=2)
        return case.add(causal(0, 300)).add(causal(40, 3)).add([90]).add(causal(5, 70))

    query = build().query()
    whole = paged_attention(query, (case := build()).keys, case.values, case.meta(), scale=0.3)
    monkeypatch.setattr(plan, "GATHER_SLOTS", 64)
    monkeypatch.setattr(plan, "KEPT_MASK_ELEMENTS", 50)
    meta = case.meta()
    parts = paged_attention(query, case.keys, case.values, meta, scale=0.3)
    assert torch.equal(whole, parts)
    (made,) = meta.plans.values()
    assert len(made.batches) == 4
    tiles = [tile for batch in made.batches for tile in batch.tiles]
    assert sum(tile.mask.numel() for tile in tiles if tile.mask is not None) <= 50


def test_a_row_has_the_bits_it_has_alone():
    shapes = [causal(50, 1), causal(7, 6), causal(0, 130), causal(90, 4)]
    batch = Case()
    for base in shapes:
        batch.add(base)
    query = batch.query()
    together = paged_attention(query, batch.keys, batch.values, batch.meta(), scale=0.3)
    begin = 0
    for row, base in enumerate(shapes):
        alone = Case()
        alone.add(base)
        alone.tables = [batch.tables[row]]
        end = begin + len(base)
        got = paged_attention(query[begin:end], batch.keys, batch.values, alone.meta(), scale=0.3)
        assert torch.equal(got, together[begin:end])
        begin = end


def test_contiguous_blocks_are_read_in_place_and_give_the_same_bits():
    apart, whole = Case(), Case(scattered=False)
    apart.add(causal(60, 5))
    whole.add(causal(60, 5))
    for source, target in zip(apart.tables[0], whole.tables[0], strict=True):
        whole.keys[target], whole.values[target] = apart.keys[source], apart.values[source]
    query = apart.query()
    meta = whole.meta()
    got = paged_attention(query, whole.keys, whole.values, meta, scale=0.3)
    assert torch.equal(got, paged_attention(query, apart.keys, apart.values, apart.meta(), scale=0.3))
    (made,) = meta.plans.values()
    assert [batch.blocks for batch in made.batches] == [None]


def test_the_plan_is_made_once_a_window():
    case = Case().add(causal(10, 3))
    meta, query = case.meta(), case.query()
    for window in (None, 4, None, 4):
        paged_attention(query, case.keys, case.values, meta, scale=0.3, window=window)
    assert len(meta.plans) == 2
    # Later layers have other tensors and the same plan.
    again = paged_attention(query, case.keys * 2, case.values, meta, scale=0.15)
    torch.testing.assert_close(again, paged_attention(query, case.keys, case.values, meta, scale=0.3))
