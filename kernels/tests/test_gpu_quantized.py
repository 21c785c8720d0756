"""Products with quantised weights, in Triton against torch; on a card, the same bits in every tile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from specdec_kernels.projection import Stream, gpu, reference, tiles
from specdec_kernels.projection.tiles import Tile
from specdec_kernels.quantized import QuantizedMatrix, words_of

CARD = torch.cuda.is_available()
DEVICE = "cuda" if CARD else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if CARD else [torch.float32]
NEAR = {torch.float32: {"atol": 1e-4, "rtol": 1e-4}, torch.bfloat16: {"atol": 1e-2, "rtol": 1.6e-2}}
EPS = 1e-5
#: Kind, inputs that share a scale (0: all), whether there are zero points.
FORMS = [("int4", 128, False), ("int4", 128, True), ("int4", 32, True), ("int4", 0, False)]
FORMS += [("fp8", 0, False), ("fp8", 128, False), ("int8", 0, False), ("int8", 64, False)]
TOKENS = [1, 17, 48, 64, 90, 150, 300, 600] if CARD else [1, 20]

pytestmark = [
    pytest.mark.parametrize("dtype", DTYPES, ids=str),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),
]


def generator(seed=0):
    return torch.Generator(DEVICE).manual_seed(seed)


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=generator(seed), device=DEVICE).to(dtype)


def weight(form, outputs, inputs, seed=5, *, ordered=False):
    kind, size, zeros = form
    groups = inputs // size if size else 1
    made = QuantizedMatrix.random(kind, outputs, inputs, groups, std=inputs**-0.5, generator=generator(seed))
    scales = made.scales.half().float()
    shape = made.scales.shape
    zero = torch.randint(0, 17, shape, device=DEVICE, generator=generator(seed)).float() if zeros else None
    order = torch.randperm(inputs, device=DEVICE, generator=generator(seed)) if ordered else None
    return QuantizedMatrix(kind=kind, codes=made.codes, scales=scales, zeros=zero, order=order)


def a_stream(tokens, width, dtype, columns=64):
    residual = randn(tokens, width, seed=3, dtype=dtype)
    return reference.stream_of(residual, 1 + 0.3 * randn(width, seed=4, dtype=dtype), columns)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("inputs", [256, 640])
def test_words_hold_every_code(form, inputs, dtype):
    made = weight(form, 70, inputs, ordered=True)
    back = words_of(made).matrix()
    assert torch.equal(back.codes.view(torch.uint8), made.codes.view(torch.uint8))
    assert torch.equal(back.dequantized(), made.dequantized())
    assert torch.equal(back.order, made.order)


def test_fp8_comes_home_by_a_mask_a_turn_and_a_shift(dtype):
    """What the kernels do with two words in a register, as integers: the codes' bits as bfloat16 has them."""
    codes = torch.randint(256, (64, 128), dtype=torch.uint8, device=DEVICE, generator=generator())
    scales = torch.ones(64, 1, device=DEVICE)
    made = QuantizedMatrix(kind="fp8", codes=codes.view(torch.float8_e4m3fn), scales=scales)
    words = words_of(made).words.long() & 0xFFFF
    pair = words[:, 0::2] | words[:, 1::2] << 16
    turned = (pair >> 4 | pair << 28) & 0xFFFFFFFF
    first, second = pair & 0x87F087F0, turned & 0x87808780 | pair << 4 & 0x00700070
    found = [torch.stack((part & 0xFFFF, part >> 16), 2).flatten(1) for part in (first, second)]
    wide = codes.long()
    assert torch.equal(torch.cat(found, 1), (wide & 0x80) << 8 | (wide & 0x7F) << 4)


def test_decoded_values_are_exact(dtype):
    """Every code of each kind, by a product with the identity."""
    x = torch.eye(256, device=DEVICE, dtype=dtype)
    for kind, count in (("int4", 16), ("int8", 256), ("fp8", 256)):
        codes = (torch.arange(256, device=DEVICE) % count).to(torch.uint8).expand(64, 256).contiguous()
        if kind == "fp8":
            codes[(codes & 127) == 127] = 0  # NaN
            codes = codes.view(torch.float8_e4m3fn)
        made = QuantizedMatrix(kind=kind, codes=codes, scales=torch.ones(64, 1, device=DEVICE))
        got = gpu.product(x, words_of(made), None).T
        assert torch.equal(got.float(), made.dequantized()), kind


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(150, 256), (70, 576 + 64), (96, 512)])
def test_products(form, outputs, inputs, dtype):
    made = weight(form, outputs, inputs, ordered=form[1] == 32)
    for tokens in TOKENS:
        x = randn(tokens, inputs, dtype=dtype)
        got = gpu.product(x, words_of(made), None)
        expected = (x.double() @ made.dequantized(torch.float64).T).to(dtype)
        torch.testing.assert_close(got, expected, **NEAR[dtype])
        torch.testing.assert_close(got, reference.product(x, words_of(made), None), **NEAR[dtype])


@pytest.mark.parametrize("form", [FORMS[1], FORMS[4]], ids=str)
def test_a_layer_of_quantised_products(form, dtype):
    """All four kinds, each on what the one before gave, with bias, head norms and narrow sums of squares."""
    hidden, inner, heads, kv_heads, dim = 256, 384, 3, 1, 64
    tokens = 5
    qkv, gate = weight(form, (heads + 2 * kv_heads) * dim, hidden), weight(form, 2 * inner, hidden, seed=6)
    down = weight(form, hidden, inner, seed=7)
    bias = randn(qkv.shape[0], seed=8, dtype=dtype)
    angles = randn(100, dim // 2, seed=11)
    gain = 1 + 0.3 * randn(hidden, seed=9, dtype=dtype)
    head_gain = 1 + 0.3 * randn(dim, seed=10, dtype=dtype)
    positions = torch.arange(tokens, device=DEVICE)
    found = []
    for chosen in (gpu, reference):
        stream = a_stream(tokens, hidden, dtype)
        caches = [torch.zeros(5, 4, kv_heads, dim, device=DEVICE, dtype=dtype) for _ in "kv"]
        gated = chosen.project_gate_up(stream, words_of(gate), None, eps=EPS, activation="silu")
        stream = chosen.add_product(gated, words_of(down), None, stream, gain)
        assert stream.columns == tiles.columns_of(words_of(down))
        results = [stream.residual, stream.scaled, chosen.normalize(stream, gain, EPS)]
        for norms in ((None, None), (head_gain, head_gain)):
            query = chosen.project_qkv(
                stream, words_of(qkv), bias, eps=EPS, cos=angles.cos(), sin=angles.sin(), positions=positions,
                write_slots=positions + 4, key_cache=caches[0], value_cache=caches[1], query_gain=norms[0],
                key_gain=norms[1], rotate=True,
            )  # fmt: skip
            results += [query, *(cache.clone() for cache in caches)]
        gated = chosen.project_gate_up(stream, words_of(gate), None, eps=EPS, activation="gelu_tanh")
        found.append([*results, gated])
    for got, expected in zip(*found, strict=True):
        near = NEAR[dtype] if dtype is torch.float32 else {**NEAR[dtype], "atol": 5e-2}
        torch.testing.assert_close(got, expected, **near)


@pytest.mark.parametrize(
    "tile",
    [
        Tile(32, (16, 0), 128, 2, 4),
        Tile(64, (32, 0), 128, 3, 4),
        Tile(128, (64, 0), 128, 2, 8),  # parts one behind the other
        Tile(64, (32, 16), 128, 2, 4),
        Tile(32, (16, 0), 128, 2, 4, early=True),
        Tile(64, (16, 0), 256, 2, 4),  # two blocks in a turn, where they are of one part
        Tile(64, (16, 0), 128, 3, 2),  # too few warps for ``wgmma``
        Tile(32, (16, 0), 128, 3, 4, batch=True),
        Tile(64, (16, 0), 256, 2, 4, batch=True),
    ],
    ids=str,
)
def test_every_kind_of_tile(monkeypatch, tile, dtype):
    monkeypatch.setattr(tiles, "choose", lambda *_: tile)
    for form in (FORMS[1], FORMS[2], FORMS[4], FORMS[7]) if CARD else (FORMS[2], FORMS[4]):
        test_products(form, 150, 512 if tile.inputs == 128 else 1024, dtype)
    if tile.rows >= 64:  # a tile of the gate has sixteen pairs at the least
        test_a_layer_of_quantised_products(FORMS[4], dtype)


@pytest.mark.skipif(not CARD, reason="the interpreter multiplies by numpy, whose bits depend on the shape")
@pytest.mark.parametrize("shape", [(512, 4096), (16512, 1024)], ids=["parts", "whole"])
@pytest.mark.parametrize("form", [FORMS[1], FORMS[2], FORMS[4], FORMS[7]], ids=str)
@pytest.mark.parametrize(
    "tile",
    [
        Tile(64, (16, 0), 256, 3, 4),  # wgmma
        Tile(64, (16, 0), 128, 4, 2),  # mma.sync
        Tile(64, (16, 0), 256, 3, 2),
        Tile(32, (16, 0), 128, 4, 4, batch=True),
        Tile(32, (16, 0), 256, 3, 4, batch=True),
        Tile(32, (32, 0), 256, 2, 4, batch=True),
    ],
    ids=str,
)
def test_tiles_of_words_give_the_same_bits(monkeypatch, tile, form, shape, dtype):
    """As those of wide products: what a tensor core adds up must not depend on the instruction."""
    if dtype is torch.float32:
        pytest.skip("has one way to multiply")
    made = words_of(weight(form, *shape))
    x = randn(100, shape[1], dtype=dtype)
    expected = gpu.product(x, made, None)
    monkeypatch.setattr(tiles, "choose", lambda *_: tile)
    for tokens in (1, 16, 100):
        assert torch.equal(gpu.product(x[:tokens], made, None), expected[:tokens])


def test_parts_follow_from_the_shape_alone(dtype):
    for outputs, inputs, parts in ((4096, 14336, 4), (28672, 4096, 1), (4096, 256, 2), (576, 576, 1)):
        kind = "fp8"
        made = words_of(
            QuantizedMatrix(
                kind=kind,
                codes=torch.zeros(outputs, inputs, dtype=torch.float8_e4m3fn),
                scales=torch.ones(outputs, 1),
            )
        )
        assert tiles.parts_of(made) == parts
    assert tiles.parts_of(torch.zeros(4096, 4096)) == 1


def test_what_words_cannot_hold(dtype):
    for form, reason in ((("int8", 32, False), "groups of 32"), (("int4", 24, False), "groups of 24")):
        with pytest.raises(ValueError, match=reason):
            words_of(weight(form, 8, 192))
    for zero in (-1.0, 7.5, 200.0):
        made = replace(weight(FORMS[0], 8, 256), zeros=torch.full((8, 2), zero, device=DEVICE))
        with pytest.raises(ValueError, match="zero points"):
            words_of(made)
    with pytest.raises(ValueError, match="int8 weights with zero points"):
        words_of(replace(weight(FORMS[6], 8, 256), zeros=torch.full((8, 1), 100.0, device=DEVICE)))


@pytest.mark.skipif(not CARD, reason="the interpreter multiplies by numpy, whose bits depend on the shape")
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_rows_of_words_are_invariant_to_the_bit(form, dtype):
    hidden, inner = (4096, 14336) if form[:2] in (("int4", 128), ("fp8", 0)) else (1024, 3072)
    gate, down = weight(form, 2 * inner, hidden), weight(form, hidden, inner, seed=6)
    gate, down = words_of(gate), words_of(down)
    gain = 1 + 0.3 * randn(hidden, seed=9, dtype=dtype)
    whole = a_stream(600, hidden, dtype)
    x = randn(600, inner, seed=2, dtype=dtype)

    def run(first, last):
        squares = F.pad(whole.squares[:, first:last], (0, -(last - first) % 16)).contiguous()
        stream = Stream(whole.residual[first:last], whole.scaled[first:last].contiguous(), squares)
        added = gpu.add_product(x[first:last], down, None, stream, gain)
        gated = gpu.project_gate_up(stream, gate, None, eps=EPS, activation="silu")
        return gated, added.residual, added.scaled, added.squares[:, : last - first].T

    expected = run(0, 600)
    for first, last in ((0, 1), (3, 9), (0, 17), (5, 45), (0, 64), (7, 100), (0, 190), (11, 310)):
        for got, wanted in zip(run(first, last), expected, strict=True):
            assert torch.equal(got, wanted[first:last]), (first, last)
