"""The fused products in Triton against their references; on a card, the same bits in every tile."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from specdec_kernels.projection import Stream, gpu, reference, side_by_side, tiles
from specdec_kernels.projection.boxes import boxes
from specdec_kernels.projection.tiles import Tile

CARD = torch.cuda.is_available()
DEVICE = "cuda" if CARD else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if CARD else [torch.float32]
#: Of results about 1. Both sum in float32; what is stored may be a rounding apart.
NEAR = {torch.float32: {"atol": 1e-4, "rtol": 1e-4}, torch.bfloat16: {"atol": 1e-2, "rtol": 1.6e-2}}
EPS = 1e-5

pytestmark = [
    pytest.mark.parametrize("dtype", DTYPES, ids=str),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),  # of a gate far below 0, in numpy
]


@dataclass(frozen=True)
class Shape:
    """Of a layer: hidden and inner width, query and KV heads, their dimensions and how many are rotated."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    dim: int
    rotated: int
    bias: bool = False
    head_norm: bool = False

    @property
    def rows(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.dim


TINY = Shape(32, 48, 4, 2, 8, 8)
ODD = Shape(100, 72, 3, 1, 24, 12, bias=True)  # nothing is a multiple of a tile
NORMED = Shape(72, 40, 2, 1, 24, 24, bias=True, head_norm=True)
SMALL = Shape(576, 200, 3, 1, 64, 64)
WIDE = Shape(64, 72, 1, 1, 256, 256, bias=True)  # a tile is half a head
LARGE = Shape(4096, 14336, 32, 8, 128, 128)  # of Llama-3.1-8B
LARGE_HEAD = Shape(8192, 14336, 32, 8, 128, 128)  # of an EAGLE-3 head for it: what its first layer takes in
LARGE_NORMED = Shape(1024, 3072, 16, 8, 128, 128, head_norm=True)  # of Qwen3-0.6B
#: A number of tokens of each class of tiles.
CLASSES = [1, 17, 48, 64, 90, 128, 150, 256, 300, 600]
CASES = [(shape, tokens) for shape in (TINY, ODD, NORMED, SMALL) for tokens in (1, 17, 70)]
if CARD:
    CASES += [(LARGE, tokens) for tokens in CLASSES]


def randn(*shape, seed=0, dtype=torch.float32, scale=1.0):
    values = torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)
    return (values * scale).to(dtype)


def a_stream(tokens, width, dtype, seed=0):
    table = randn(97, width, seed=seed, dtype=dtype)
    ids = torch.arange(tokens, device=DEVICE) * 31 % 97
    return reference.embed(ids, table, 1 + 0.3 * randn(width, seed=seed + 1, dtype=dtype))


def same(got: Stream, expected: Stream, dtype):
    tokens = len(got.residual)
    near = NEAR[dtype] if dtype is torch.float32 else {**NEAR[dtype], "atol": 5e-2}  # products are rounded
    torch.testing.assert_close(got.residual, expected.residual, **near)
    torch.testing.assert_close(got.scaled, expected.scaled, **near)
    torch.testing.assert_close(got.squares[:, :tokens], expected.squares[:, :tokens], rtol=2e-2, atol=1e-3)


def weights(rows, width, dtype, *, bias=False, seed=5):
    weight = randn(rows, width, seed=seed, dtype=dtype, scale=width**-0.5)
    return weight, randn(rows, seed=seed + 1, dtype=dtype) if bias else None


def qkv(implementation, shape: Shape, stream: Stream, dtype, *, first=0, rotate=True):
    """Queries, keys and values of tokens from ``first`` on, by their number."""
    tokens = len(stream.residual)
    weight, bias = weights(shape.rows, shape.hidden, dtype, bias=shape.bias)
    angles = randn(1000, shape.rotated // 2, seed=11) * 3
    slots = (torch.randperm(1024, generator=torch.Generator().manual_seed(1)) + 16)[first : first + tokens]
    caches = [torch.full((65, 16, shape.kv_heads, shape.dim), 7.0, device=DEVICE, dtype=dtype) for _ in "kv"]
    gains = [1 + 0.3 * randn(shape.dim, seed=s, dtype=dtype) if shape.head_norm else None for s in (13, 14)]
    query = implementation.project_qkv(
        stream,
        weight,
        bias,
        eps=EPS,
        cos=angles.cos(),
        sin=angles.sin(),
        positions=(torch.arange(first, first + tokens, device=DEVICE) * 37) % 1000,
        write_slots=slots.to(DEVICE),
        key_cache=caches[0],
        value_cache=caches[1],
        query_gain=gains[0],
        key_gain=gains[1],
        rotate=rotate,
    )
    written = [cache.flatten(0, 1)[slots.to(DEVICE)] for cache in caches]
    untouched = [(cache == 7).all((2, 3)).sum() for cache in caches]
    assert [int(count) for count in untouched] == [65 * 16 - tokens] * 2
    return query, *written


@pytest.mark.parametrize(("shape", "tokens"), CASES, ids=str)
def test_queries_keys_and_values(shape, tokens, dtype):
    stream = a_stream(tokens, shape.hidden, dtype)
    for got, expected in zip(
        qkv(gpu, shape, stream, dtype), qkv(reference, shape, stream, dtype), strict=True
    ):
        torch.testing.assert_close(got, expected, **NEAR[dtype])


def test_a_layer_without_positions(dtype):
    stream = a_stream(3, ODD.hidden, dtype)
    got, expected = (qkv(chosen, ODD, stream, dtype, rotate=False) for chosen in (gpu, reference))
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **NEAR[dtype])


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("shape", "tokens"), CASES, ids=str)
def test_gates(shape, tokens, activation, dtype):
    stream = a_stream(tokens, shape.hidden, dtype)
    weight, bias = weights(2 * shape.inner, shape.hidden, dtype, bias=shape.bias)
    got, expected = (
        chosen.project_gate_up(stream, 4 * weight, bias, eps=EPS, activation=activation)
        for chosen in (gpu, reference)
    )
    if dtype is torch.float32:  # gates of either sign multiply errors: as near to the truth as the reference
        scale = (stream.residual.double().square().mean(1, keepdim=True) + EPS).rsqrt()
        heads = stream.scaled.double() @ (4 * weight).double().T * scale + (
            0 if bias is None else bias.double()
        )
        gate, up = heads.chunk(2, 1)
        truth = up * (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh"))
        off, allowed = ((out.double() - truth).abs().max().item() for out in (got, expected))
        assert off <= 8 * allowed + 1e-5  # a sum in order is less accurate than one in blocks
        return
    torch.testing.assert_close(got, expected, **NEAR[dtype])


@pytest.mark.parametrize(("shape", "tokens"), CASES, ids=str)
def test_additions_to_the_stream(shape, tokens, dtype):
    stream = a_stream(tokens, shape.hidden, dtype)
    before = stream.residual.clone()
    x = randn(tokens, shape.inner, seed=3, dtype=dtype)
    weight, bias = weights(shape.hidden, shape.inner, dtype, bias=shape.bias)
    gain = 1 + 0.3 * randn(shape.hidden, seed=9, dtype=dtype)
    got, expected = (chosen.add_product(x, weight, bias, stream, gain) for chosen in (gpu, reference))
    same(got, expected, dtype)
    assert torch.equal(stream.residual, before)
    torch.testing.assert_close(
        gpu.normalize(got, gain, EPS), reference.normalize(got, gain, EPS), **NEAR[dtype]
    )


@pytest.mark.parametrize("tokens", CLASSES if CARD else [1, 17, 70])
def test_products(tokens, dtype):
    x = randn(tokens, 84, dtype=dtype)
    for bias in (False, True):
        weight, vector = weights(150, 84, dtype, bias=bias)
        torch.testing.assert_close(
            gpu.product(x, weight, vector), reference.product(x, weight, vector), **NEAR[dtype]
        )


@pytest.mark.parametrize("width", [32, 100, 576, 2048])
def test_embedding(width, dtype):
    table, gain = randn(50, width, dtype=dtype), randn(width, seed=1, dtype=dtype)
    ids = torch.tensor([3, 49, 0, 3], device=DEVICE)
    got = gpu.embed(ids, table, gain)
    same(got, reference.embed(ids, table, gain), dtype)
    assert torch.equal(got.residual, table[ids])


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("width", [100, 2048])
def test_terms_are_added_up(count, width, dtype):
    terms, gain = randn(count, 5, width, dtype=dtype), randn(width, seed=1, dtype=dtype)
    for stream in (None, a_stream(5, width, dtype)):
        same(gpu.add(terms, stream, gain), reference.add(terms, stream, gain), dtype)


def test_a_term_is_added_as_its_product_is(dtype):
    x, (weight, _), stream = (
        randn(5, 64, dtype=dtype),
        weights(96, 64, dtype, bias=False),
        a_stream(5, 96, dtype),
    )
    gain = randn(96, seed=1, dtype=dtype)
    same(
        gpu.add(gpu.product(x, weight, None)[None], stream, gain),
        gpu.add_product(x, weight, None, stream, gain),
        dtype,
    )


def test_some_tokens_are_normalised(dtype):
    stream = a_stream(17, SMALL.hidden, dtype)
    gain = 1 + 0.3 * randn(SMALL.hidden, seed=9, dtype=dtype)
    rows = torch.tensor([16, 3, 3], device=DEVICE)
    got = gpu.normalize(stream, gain, EPS, rows)
    assert torch.equal(got, gpu.normalize(stream, gain, EPS)[rows])
    torch.testing.assert_close(got, reference.normalize(stream, gain, EPS, rows), **NEAR[dtype])


@pytest.mark.parametrize(("table_normed", "normed"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize(("embedded", "width"), [(24, 100), (576, 48), (4096, 4096)] if CARD else [(24, 100)])
def test_embeddings_and_features_side_by_side(embedded, width, table_normed, normed, dtype):
    table, features = randn(50, embedded, dtype=dtype), 3 * randn(4, width, seed=2, dtype=dtype)
    gains = [1 + 0.3 * randn(size, seed=size, dtype=dtype) for size in (embedded, width)]
    ids = torch.tensor([3, 49, 0], device=DEVICE)
    chosen = {"table_gain": gains[0] if table_normed else None, "feature_gain": gains[1] if normed else None}
    for rows in (None, torch.tensor([3, 1, 1], device=DEVICE)):
        own = features[:3].contiguous() if rows is None else features
        got = gpu.join(ids, table, own, **chosen, eps=EPS, rows=rows)
        torch.testing.assert_close(
            got, reference.join(ids, table, own, **chosen, eps=EPS, rows=rows), **NEAR[dtype]
        )
        if rows is not None:
            one = gpu.join(ids[1:2], table, own, **chosen, eps=EPS, rows=rows[1:2])
            assert torch.equal(one, got[1:2])  # whatever stands beside it
        if not table_normed:
            assert torch.equal(got[:, :embedded], table[ids])


@pytest.mark.parametrize(("count", "width"), [(1, 40), (3, 1100), (5, 16)])
def test_rows_gathered_side_by_side(count, width, dtype):
    parts = [randn(9, width, seed=seed, dtype=dtype) for seed in range(count)]
    rows = torch.tensor([8, 0, 8], device=DEVICE)
    got = gpu.gather(parts, rows)
    assert torch.equal(got, torch.cat([part[rows] for part in parts], 1))
    columns = got.chunk(count, 1)
    assert side_by_side(columns).data_ptr() == got.data_ptr()
    assert torch.equal(side_by_side(columns), got)
    for other in (columns[::-1], columns[:1], [column.clone() for column in columns]):
        assert torch.equal(side_by_side(other), torch.cat(list(other), 1))


def test_rows_need_not_lie_one_behind_the_other(dtype):
    """A state that stands for several tokens at once, as the root's of a tree, is a view of stride 0."""
    one, spread = (randn(1, 100, seed=2, dtype=dtype).expand(4, -1), randn(4, 300, dtype=dtype)[:, ::3])
    gain, ids = 1 + 0.3 * randn(100, seed=9, dtype=dtype), torch.tensor([3, 49, 0, 7], device=DEVICE)
    table, (weight, _) = randn(50, 24, dtype=dtype), weights(100, 100, dtype, bias=False)
    for rows in (one, spread):
        whole = rows.clone(memory_format=torch.contiguous_format)
        squares = reference.add(whole[None], None, gain).squares
        calls = (
            lambda x: gpu.join(ids, table, x, table_gain=None, feature_gain=gain, eps=EPS),
            lambda x: gpu.gather([x, x], ids[2:] % 4),
            lambda x: gpu.product(x, weight, None),
            lambda x: gpu.add(x[None], Stream(x, x, None), gain).residual,
            lambda x: gpu.add_product(x, weight, None, Stream(x, x, None), gain).residual,
            lambda x, by=squares: gpu.normalize(Stream(x, x, by), gain, EPS),
            lambda x, by=squares: gpu.project_gate_up(
                Stream(x, x, by), weight, None, eps=EPS, activation="silu"
            ),
        )
        assert all(torch.equal(call(rows), call(whole)) for call in calls)


@pytest.mark.parametrize("tokens", [1, 48] if CARD else [3])
def test_a_layer_on_what_is_normalised_already(tokens, dtype):
    """Its input is of another width than the stream that it adds to."""
    shape = replace(ODD, hidden=150)
    x = randn(tokens, shape.hidden, seed=4, dtype=dtype)
    stream = Stream(randn(tokens, 100, seed=3, dtype=dtype), x, None)
    unit = Stream(x, x, torch.full((3, 64), 50.0, device=DEVICE))  # squares that make an RMS of 1
    for got, expected, by_one in zip(
        qkv(gpu, shape, stream, dtype),
        qkv(reference, shape, stream, dtype),
        qkv(reference, shape, unit, dtype),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, **NEAR[dtype])
        torch.testing.assert_close(expected, by_one, **NEAR[dtype])
    weight, _ = weights(100, 72, dtype)
    gain = 1 + 0.3 * randn(100, seed=9, dtype=dtype)
    y = randn(tokens, 72, seed=8, dtype=dtype)
    same(*(chosen.add_product(y, weight, None, stream, gain) for chosen in (gpu, reference)), dtype)


@pytest.mark.parametrize(
    "tile",
    [
        Tile(64, (32, 16), 32, 2, 4),
        Tile(128, (16, 0), 16, 2, 4),
        Tile(128, (32, 16), 64, 3, 4),
        Tile(64, (32, 16), 32, 2, 4, early=True),
        Tile(64, (32, 16), 32, 2, 4, boxes=True),
        Tile(128, (32, 16), 32, 2, 4, early=True, boxes=True),
    ],
    ids=str,
)
def test_every_kind_of_tile(monkeypatch, tile, dtype):
    monkeypatch.setattr(tiles, "choose", lambda *_: tile)
    shapes = (ODD, NORMED, *((WIDE,) if tile.boxes else ()))
    for shape in shapes:
        test_queries_keys_and_values(shape, 50, dtype)
    for shape in shapes[1:] if tile.boxes else shapes[:1]:
        test_gates(shape, 50, "silu", dtype)
        test_additions_to_the_stream(shape, 50, dtype)
    test_products(100, dtype)


@pytest.mark.parametrize(
    ("outputs", "inputs", "rows", "pairs", "box"),
    [
        (150, 64, 128, 0, [128, 32]),
        (150, 66, 64, 0, None),  # rows do not begin at multiples of 16 bytes
        (512, 64, 512, 0, None),  # longer than a box may be
        (400, 64, 128, 200, [64, 32]),  # halves of a gate, of which the last tile is not full
        (400, 64, 64, 200, None),  # a half is less than an instruction takes
        (5 * 128, 64, 128, 64, [64, 32]),  # a head
        (5 * 64, 64, 128, 32, None),  # two heads, so four stretches of rows
        (5 * 192, 64, 128, 96, None),  # a tile would begin in one head and end in the next
    ],
)
def test_what_is_loaded_in_boxes(outputs, inputs, rows, pairs, box, dtype):
    weight, x = (torch.zeros(count, inputs, dtype=torch.bfloat16, device=DEVICE) for count in (outputs, 7))
    found = boxes(weight, x, Tile(rows, (32, 16), 32, 2, 4), pairs)
    assert box == (found and found[0].block_shape)
    if found is not None:
        assert [part and part.block_shape for part in found[1:]] == [[32, 32], [16, 32]]


@pytest.mark.skipif(not CARD, reason="the interpreter multiplies by numpy, whose bits depend on the shape")
@pytest.mark.parametrize("how", [{"early": True}, {"boxes": True}, {"early": True, "boxes": True}], ids=str)
@pytest.mark.parametrize("tokens", [1, 6, 40, 192, 300])
def test_how_a_tile_is_loaded_changes_no_bits(monkeypatch, tokens, how, dtype):
    chosen = tiles.choose
    for shape in (LARGE, LARGE_NORMED, SMALL):
        stream = a_stream(tokens, shape.hidden, dtype)
        x = randn(tokens, shape.inner, seed=3, dtype=dtype)
        gate, _ = weights(2 * shape.inner, shape.hidden, dtype)
        down, _ = weights(shape.hidden, shape.inner, dtype)
        gain = 1 + 0.3 * randn(shape.hidden, seed=9, dtype=dtype)

        def run():
            added = gpu.add_product(x, down, None, stream, gain)  # noqa: B023  called at once
            return [
                *qkv(gpu, shape, stream, dtype),  # noqa: B023
                gpu.project_gate_up(stream, gate, None, eps=EPS, activation="silu"),  # noqa: B023
                *(added.residual, added.scaled, added.squares[:, :tokens]),
                gpu.product(x, down, None),  # noqa: B023
            ]

        monkeypatch.setattr(tiles, "choose", chosen)
        expected = run()
        monkeypatch.setattr(tiles, "choose", lambda *wanted: replace(chosen(*wanted), **how))
        for got, wanted in zip(run(), expected, strict=True):
            assert torch.equal(got, wanted)


def test_tiles_are_the_tuned_ones_where_there_are_any(monkeypatch, dtype):
    name = str(dtype).removeprefix("torch.")
    table = {"sm_90": {name: {"add": {"64x96": {"32": [128, 32, 16, 64, 5, 8, 1024]}}}}}
    monkeypatch.setattr(tiles, "tuned", lambda: table)
    tiles.choose.cache_clear()
    try:
        tuned = Tile(128, (32, 16), 64, 5, 8, 1024)
        assert tiles.choose("add", dtype, "sm_90", 64, 96, 32) == tuned
        assert Tile.parse(tuned.values) == tuned
        assert Tile.parse([*tuned.values, 0, 1]) == replace(tuned, boxes=True)
        assert Tile.parse(replace(tuned, early=True).values) == replace(tuned, early=True)
        for other in (("qkv", "sm_90", 32), ("add", "sm_80", 32), ("add", "sm_90", 16)):
            kind, card, bound = other
            assert tiles.choose(kind, dtype, card, 64, 96, bound) == tiles.by_rule(kind, dtype, 64, 96, bound)
    finally:
        tiles.choose.cache_clear()


@pytest.mark.parametrize("shared", [101376, 166912, 232448])
def test_tiles_fit_into_shared_memory(shared, dtype):
    size = dtype.itemsize
    for kind in ("product", "add", "gate_up", "qkv"):
        for bound in tiles.CLASSES:
            rule = tiles.by_rule(kind, dtype, 28672, 4096, bound)
            assert sum(rule.tokens) >= min(bound, 64)
            for rows in (1, 128, 256):
                tile = tiles.fitted(rule, size, shared, rows=rows)
                assert tile.rows % rows == 0
                assert tile.stages * (tile.rows + sum(tile.tokens)) * tile.inputs * size <= shared


@pytest.mark.parametrize("tokens", [1, 70])
def test_a_product_with_what_is_added_to_it(tokens, dtype):
    """Rounded once, as the same product is that is added to a stream."""
    x, delta = (randn(tokens, width, seed=width, dtype=dtype) for width in (ODD.inner, ODD.hidden))
    weight, bias = weights(ODD.hidden, ODD.inner, dtype, bias=True)
    got, want = (chosen.product(x, weight, bias, delta) for chosen in (gpu, reference))
    torch.testing.assert_close(got, want, **NEAR[dtype])
    stream, gain = a_stream(tokens, ODD.hidden, dtype), randn(ODD.hidden, seed=1, dtype=dtype)
    added = gpu.add_product(x, weight, bias, stream, gain, delta=delta)
    assert torch.equal(added.residual, gpu.add(got[None], stream, gain).residual)


def test_a_layer_is_what_norms_and_products_are(dtype):
    """The references, which the tests above compare with, against a layer written out in float64."""
    shape = replace(NORMED, bias=False)
    tokens = 5
    stream = a_stream(tokens, shape.hidden, torch.float32)
    gain = stream.scaled / stream.residual
    x = F.rms_norm(stream.residual.double(), (shape.hidden,), None, EPS) * gain.double()
    weight, _ = weights(shape.rows, shape.hidden, torch.float32)
    heads = (x @ weight.double().T).unflatten(1, (-1, shape.dim))
    gains = [1 + 0.3 * randn(shape.dim, seed=seed).double() for seed in (13, 14)]
    query = F.rms_norm(heads[:, :2], (shape.dim,), gains[0], EPS)
    key = F.rms_norm(heads[:, 2:3], (shape.dim,), gains[1], EPS)
    angles = (randn(1000, shape.rotated // 2, seed=11) * 3).double()[torch.arange(tokens) * 37][:, None]
    half = shape.rotated // 2

    def rotated(y):
        low, high = y[..., :half], y[..., half : 2 * half]
        turned = low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()
        return torch.cat((*turned, y[..., 2 * half :]), -1).float()

    got = qkv(reference, shape, stream, torch.float32)
    for ours, theirs in zip(got, (rotated(query), rotated(key), heads[:, 3:].float()), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)
    weight, _ = weights(2 * shape.inner, shape.hidden, torch.float32)
    gate, up = (x @ weight.double().T).chunk(2, 1)
    gated = reference.project_gate_up(stream, weight, None, eps=EPS, activation="silu")
    torch.testing.assert_close(gated, (F.silu(gate) * up).float(), atol=2e-5, rtol=2e-5)
    weight, _ = weights(shape.hidden, shape.inner, torch.float32)
    new = reference.add_product(gated, weight, None, stream, gain[0])
    expected = stream.residual.double() + gated.double() @ weight.double().T
    torch.testing.assert_close(new.residual, expected.float(), atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(
        reference.normalize(new, gain[0], EPS),
        F.rms_norm(expected, (shape.hidden,), gain[0].double(), EPS).float(),
        atol=2e-5,
        rtol=2e-5,
    )


@pytest.mark.skipif(not CARD, reason="the interpreter multiplies by numpy, whose bits depend on the shape")
def test_a_heads_first_layer_has_the_same_bits_in_every_class(dtype):
    x = randn(300, LARGE_HEAD.hidden, seed=4, dtype=dtype)

    def run(start, stop):
        own = x[start:stop].clone()
        return qkv(gpu, LARGE_HEAD, Stream(own[:, :64], own, None), dtype, first=start)

    everything = run(0, 300)
    for count in (1, 4, 17, 48, 64, 128):
        for start in (0, 150):
            for got, whole in zip(run(start, start + count), everything, strict=True):
                assert torch.equal(got, whole[start : start + count])


def test_no_tokens(dtype):
    stream = a_stream(0, TINY.hidden, dtype)
    assert qkv(gpu, TINY, stream, dtype)[0].shape == (0, TINY.heads, TINY.dim)
    weight, _ = weights(2 * TINY.inner, TINY.hidden, dtype)
    assert gpu.project_gate_up(stream, weight, None, eps=EPS, activation="silu").shape == (0, TINY.inner)
    assert gpu.product(stream.residual, weight, None).shape == (0, 2 * TINY.inner)
    ids = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    assert gpu.embed(ids, weight, weight[0]).residual.shape == (0, TINY.hidden)


def part(stream: Stream, start: int, stop: int) -> Stream:
    """The stream of some of its tokens, in memory of its own."""
    out = Stream.empty(stop - start, stream.residual.shape[1], stream.residual)
    out.residual.copy_(stream.residual[start:stop])
    out.scaled.copy_(stream.scaled[start:stop])
    out.squares[:, : stop - start] = stream.squares[:, start:stop]
    return out


@pytest.mark.skipif(not CARD, reason="the interpreter multiplies by numpy, whose bits depend on the shape")
@pytest.mark.parametrize("shape", [LARGE, LARGE_NORMED, ODD], ids=str)
def test_a_token_has_the_same_bits_in_every_class(shape, dtype):
    total = 700
    whole = a_stream(total, shape.hidden, dtype)
    x = randn(total, shape.inner, seed=3, dtype=dtype)
    gate, gate_bias = weights(2 * shape.inner, shape.hidden, dtype, bias=shape.bias)
    down, down_bias = weights(shape.hidden, shape.inner, dtype, bias=shape.bias)
    gain = 1 + 0.3 * randn(shape.hidden, seed=9, dtype=dtype)

    def run(start, stop):
        stream = part(whole, start, stop)
        inputs = x[start:stop].clone()
        added = gpu.add_product(inputs, down, down_bias, stream, gain)
        return {
            "qkv": qkv(gpu, shape, stream, dtype, first=start),
            "gate_up": (gpu.project_gate_up(stream, gate, gate_bias, eps=EPS, activation="silu"),),
            "add": (added.residual, added.scaled, added.squares[:, : stop - start].T),
            "normalize": (gpu.normalize(added, gain, EPS),),
            "product": (gpu.product(inputs, down, down_bias),),
        }

    everything = run(0, total)
    differing = []
    for count in (1, 3, *(CLASSES[1:-1] if shape is LARGE else (17, 64, 90, 150, 300))):
        for start in (0, 333):
            for name, outputs in run(start, start + count).items():
                for index, output in enumerate(outputs):
                    other = everything[name][index][start : start + count]
                    if not torch.equal(output, other):
                        wrong = int((output != other).sum())
                        differing.append(f"{name}[{index}] of {count} tokens from {start}: {wrong} elements")
    assert not differing, "\n".join(differing)
