"""The Triton attention kernel against the definition, and against itself divided otherwise."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from specdec_kernels.attention import AttentionMetadata, gpu, paged_attention
from specdec_kernels.attention.gpu_kernel import BY_CHUNK, BY_TILE, SERIAL

ON_A_CARD = torch.cuda.is_available()
DEVICE = "cuda" if ON_A_CARD else "cpu"
DTYPES = [torch.float32, *([torch.bfloat16] if ON_A_CARD else [])]
MODES = [SERIAL, BY_CHUNK, BY_TILE]
SCALE = 0.2
card_only = pytest.mark.skipif(not ON_A_CARD, reason="bits of the card's own instructions")


class Batch:
    """Rows of a paged cache, each a list of what its tokens see: ``(base, tree slots)``."""

    def __init__(
        self,
        rows,
        *,
        heads=4,
        kv_heads=2,
        k_dim=16,
        v_dim=16,
        block=16,
        dtype=torch.float32,
        index=torch.int64,
        seed=0,
    ):
        generator = torch.Generator().manual_seed(seed)
        self.rows, self.block, self.heads, self.kv_heads = rows, block, heads, kv_heads
        seen = [
            max((max([base, *(slot + 1 for slot in tree)]) for base, tree in row), default=0) for row in rows
        ]
        need = [max(1, -(-slots // block)) for slots in seen]
        order = (torch.randperm(sum(need), generator=generator) + 1).tolist()
        self.table = torch.zeros(len(rows), max(need), dtype=index)
        for row, count in enumerate(need):
            self.table[row, :count] = torch.tensor([order.pop() for _ in range(count)])

        def randn(*shape):
            return torch.randn(shape, generator=generator).to(dtype)

        self.keys = randn(sum(need) + 1, block, kv_heads, k_dim)
        self.values = randn(sum(need) + 1, block, kv_heads, v_dim)
        self.query = randn(sum(map(len, rows)), heads, k_dim)

    def meta(self, layout="listed", first=0):
        lengths = [len(row) for row in self.rows]
        seen = [token for row in self.rows for token in row]
        widest = max(len(tree) for _, tree in seen)
        return AttentionMetadata(
            rows=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(DEVICE),
            positions=torch.tensor([base - 1 + len(tree) for base, tree in seen]).to(DEVICE),
            write_slots=torch.zeros(len(seen), dtype=torch.long, device=DEVICE),
            base=torch.tensor([base for base, _ in seen]).to(DEVICE),
            block_table=self.table.to(DEVICE),
            block_size=self.block,
            first=first,
            extra=torch.tensor([[*tree, *[-1] * (widest - len(tree))] for _, tree in seen]).to(DEVICE)
            if widest
            else None,
            tokens_per_row=lengths[0] if layout == "uniform" else None,
            lengths=tuple(lengths) if layout == "listed" else None,
        )

    def attend(self, meta, *, window=None, mode=None):
        caches = [tensor.to(DEVICE) for tensor in (self.keys, self.values)]
        out = gpu.paged_attention(self.query.to(DEVICE), *caches, meta, scale=SCALE, window=window, mode=mode)
        return out.cpu()

    def definition(self, *, first=0, window=None):
        """Token by token, in float64."""
        out = torch.zeros(len(self.query), self.heads, self.values.shape[-1], dtype=torch.float64)
        tokens = [(row, *token) for row, tokens in enumerate(self.rows) for token in tokens]
        for t, (row, base, tree) in enumerate(tokens):
            own = base - 1 + len(tree)
            position = {slot: slot for slot in range(base)} | {
                slot: own - sum(other > slot for other in tree) for slot in tree
            }
            slots = [s for s, at in position.items() if s >= first and (window is None or at > own - window)]
            if not slots:
                continue
            at = [int(self.table[row, s // self.block]) * self.block + s % self.block for s in slots]
            keys, values = (x.flatten(0, 1)[at].double() for x in (self.keys, self.values))
            group = self.heads // self.kv_heads
            scores = (
                torch.einsum("shd,hgd->hgs", keys, self.query[t].double().unflatten(0, (-1, group))) * SCALE
            )
            out[t] = torch.einsum("hgs,shd->hgd", scores.softmax(-1), values).flatten(0, 1)
        return out

    def check(self, layouts=("listed",), modes=MODES, *, first=0, window=None):
        want = self.definition(first=first, window=window)
        tolerance = 1e-5 if self.query.dtype is torch.float32 else 2e-2
        for layout in layouts:
            results = [self.attend(self.meta(layout, first), window=window, mode=mode) for mode in modes]
            for result in results:
                torch.testing.assert_close(result.double(), want, atol=tolerance, rtol=tolerance)
                assert torch.equal(result, results[0])  # to the bit, whoever does what


def causal(start, count):
    return [(slot + 1, []) for slot in range(start, start + count)]


TREE = [[], [10], [11], [10, 12], [10, 13], [11, 14], [10, 13, 15]]


def tree(base):
    return [(base, [slot - 10 + base for slot in nodes]) for nodes in TREE]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_layout_in_every_mode_equals_the_definition(dtype):
    rows = [causal(start, 2) for start in (0, 61, 318)]
    Batch(rows, kv_heads=1, dtype=dtype, index=torch.int32).check(("uniform", "listed", "single"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 5, 70])
def test_windows_trees_and_rows_of_any_length(dtype, window):
    rows = [causal(100, 9), [], tree(62), causal(0, 2), tree(10), [(0, [0, 1])], causal(290, 1)]
    Batch(rows, kv_heads=1, dtype=dtype).check(window=window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 70])
def test_where_processors_are_idle_few_tokens_of_a_tree_share_a_tile(monkeypatch, dtype, window):
    """Which does not change a bit."""
    rows = [tree(base) for base in (62, 130, 10)]
    batch = Batch(rows, kv_heads=2, dtype=dtype)
    found, shared = [], []
    for processors in (2, 12, 66, 132):
        monkeypatch.setattr(gpu, "_num_sms", lambda device, processors=processors: processors)
        batch.check(("listed", "uniform"), window=window)
        meta = batch.meta("uniform")
        found.append(batch.attend(meta, window=window))
        (plan,) = meta.plans.values()
        shared.append(plan.tokens_per_tile)
    assert shared == [7, 7, 4, 1]
    assert all(torch.equal(found[0], other) for other in found[1:])
    chain = Batch([causal(100, 7)], kv_heads=1, dtype=dtype).meta("uniform")
    assert gpu._plan(chain, 2, 1, 16, dtype, None).tokens_per_tile == 8  # nobody waits for a turn there


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("base", [5, 62, 63, 128])
def test_a_node_has_the_bits_of_its_path(dtype, base):
    """Wherever its ancestors are stored, they are summed where they would be if they were committed."""
    paths = [[0], [0, 2], [1], [1, 4], [0, 2, 3], [0, 2, 3, 5]]
    nodes = Batch([[(base, [base + node for node in path]) for path in paths]], kv_heads=1, dtype=dtype)
    for mode in MODES:
        got = nodes.attend(nodes.meta(), mode=mode)
        for t, path in enumerate(paths):
            alone = Batch([[(base + len(path), [])]], kv_heads=1, dtype=dtype)
            alone.table, alone.query = nodes.table, nodes.query[t : t + 1]
            alone.keys, alone.values = nodes.keys.clone(), nodes.values.clone()
            for level, node in enumerate(path):  # a parent's place is never above its node's
                for moved, kept in ((alone.keys, nodes.keys), (alone.values, nodes.values)):
                    source, target = (
                        (int(nodes.table[0, slot // nodes.block]), slot % nodes.block)
                        for slot in (base + node, base + level)
                    )
                    moved[target] = kept[source]
            told = alone.attend(alone.meta(), mode=mode)[0]
            if ON_A_CARD:
                assert torch.equal(told, got[t])
            else:  # the interpreter's products are numpy's, whose bits depend on the processor
                torch.testing.assert_close(told, got[t], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_slots_below_the_first_are_not_seen(dtype):
    Batch([causal(0, 2), tree(62), [(0, [1])]], kv_heads=1, dtype=dtype).check(first=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "k_dim", "v_dim", "block"),
    [(5, 1, 8, 24, 4), (3, 3, 64, 32, 48), (32, 1, 16, 16, 512)],
)
def test_shapes_that_are_not_powers_of_two(dtype, heads, kv_heads, k_dim, v_dim, block):
    shape = {"heads": heads, "kv_heads": kv_heads, "k_dim": k_dim, "v_dim": v_dim, "block": block}
    Batch([causal(66, 5), causal(3, 1)], dtype=dtype, **shape).check(("listed", "single"), [SERIAL, BY_CHUNK])


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_contexts_have_longer_chunks(dtype):
    batch = Batch([[(8192 + 33 * 64 + 5, [])], [(8190, [])]], heads=1, kv_heads=1, dtype=dtype)
    for window in (2200, *([None] if ON_A_CARD else [])):
        batch.check(modes=[SERIAL, BY_CHUNK], window=window)


@pytest.mark.parametrize("mode", MODES)
def test_a_token_that_sees_nothing_gives_zero_even_beside_nan(mode):
    batch = Batch([[(0, []), (0, [])], causal(4, 3), [(0, [])]])
    for cache in (batch.keys, batch.values):
        cache[batch.table[[0, 2], 0]] = float("nan")
    got = batch.attend(batch.meta(), mode=mode)
    assert got[[0, 1, 5]].eq(0).all()
    torch.testing.assert_close(got.double(), batch.definition(), atol=1e-5, rtol=1e-5)


def test_what_is_asked_for_is_told_from_static_facts():
    batch = Batch([causal(300, 2), causal(130, 2)])
    meta = batch.meta("uniform")
    first = batch.attend(meta)
    (plan,) = meta.plans.values()
    assert torch.equal(batch.attend(meta), first)
    assert list(meta.plans.values()) == [plan]
    # The same metadata serves what its tensors hold later, as in a captured graph.
    meta.base.copy_(torch.tensor([5, 6, 64, 65]))
    batch.rows = [causal(4, 2), causal(63, 2)]
    torch.testing.assert_close(batch.attend(meta).double(), batch.definition(), atol=1e-5, rtol=1e-5)


def test_metadata_whose_hints_do_not_fit_is_refused():
    meta = Batch([causal(3, 2), causal(4, 2)]).meta()
    for hint in ({"tokens_per_row": 3, "lengths": None}, {"lengths": (4,)}, {"lengths": (1, 2)}):
        with pytest.raises(ValueError, match="tokens"):
            dataclasses.replace(meta, **hint)


def test_dispatch_takes_the_kernel(monkeypatch):
    batch = Batch([causal(3, 2)])
    caches = [tensor.to(DEVICE) for tensor in (batch.keys, batch.values)]
    got = paged_attention(batch.query.to(DEVICE), *caches, meta := batch.meta(), scale=SCALE)
    assert next(iter(meta.plans))[0] == "triton"
    torch.testing.assert_close(got.cpu().double(), batch.definition(), atol=1e-5, rtol=1e-5)
    assert paged_attention(batch.query[:0].to(DEVICE), *caches, batch.meta(), scale=SCALE).shape == (0, 4, 16)


@card_only
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [8, 14])
def test_a_token_has_the_bits_it_has_alone(dtype, heads):
    """Whatever stands beside it, and however its row's tokens are cut into query tiles."""
    starts = [509, 300, 512, 64, 63, 777, 130, 2040]
    rows = [causal(start, 6) for start in starts]
    whole = Batch(rows, heads=heads, k_dim=128, v_dim=128, dtype=dtype)
    want = whole.attend(whole.meta("uniform"))
    for layout in ("listed", "single"):
        for mode in MODES:
            assert torch.equal(whole.attend(whole.meta(layout), mode=mode), want)
    query = whole.query
    for row, tokens in enumerate(rows):
        for t in range(6):
            part = Batch([[tokens[t]]], heads=heads, k_dim=128, v_dim=128, dtype=dtype)
            part.keys, part.values, part.table = whole.keys, whole.values, whole.table[row : row + 1]
            part.query = query[row * 6 + t : row * 6 + t + 1]
            assert torch.equal(part.attend(part.meta("uniform")), want[row * 6 + t : row * 6 + t + 1])


@card_only
@pytest.mark.parametrize("mode", MODES)
def test_a_captured_graph_equals_the_call(mode):
    batch = Batch([causal(300, 4), causal(130, 4)], k_dim=128, v_dim=128, dtype=torch.bfloat16)
    caches = [tensor.to(DEVICE) for tensor in (batch.keys, batch.values)]
    query, meta = batch.query.to(DEVICE), batch.meta("uniform")

    def call():
        return gpu.paged_attention(query, *caches, meta, scale=SCALE, window=None, mode=mode)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for shift in (0, -100, 3):
        meta.base.copy_(torch.tensor([min(base + shift, 304) for row in batch.rows for base, _ in row]))
        graph.replay()
        assert torch.equal(out, call())
