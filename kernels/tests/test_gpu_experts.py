"""Mixtures of experts in Triton against torch; on a card, a token's bits are its own."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton")

from specdec_kernels.experts import expected_experts, gpu, reference
from specdec_kernels.projection import reference as projection

CARD = torch.cuda.is_available()
DEVICE = "cuda" if CARD else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if CARD else [torch.float32]
NEAR = {torch.float32: {"atol": 1e-4, "rtol": 1e-4}, torch.bfloat16: {"atol": 2e-2, "rtol": 2e-2}}
EPS = 1e-5
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # in numpy, of masked lanes


@dataclass(frozen=True)
class Shape:
    """Hidden and inner width, experts, and how many a token takes."""

    hidden: int
    inner: int
    experts: int
    count: int


TINY = Shape(32, 48, 4, 2)
ODD = Shape(100, 36, 5, 3)  # nothing is a multiple of a tile
ONE = Shape(64, 16, 1, 1)
A3B = Shape(2048, 768, 128, 8)  # of Qwen3-30B-A3B
MIXTRAL = Shape(4096, 14336, 8, 2)
CASES = [(TINY, 1), (TINY, 17), (ODD, 1), (ODD, 20), (ONE, 3)]
if CARD:
    CASES += [(A3B, tokens) for tokens in (1, 6, 16, 48, 64, 192, 600)] + [(MIXTRAL, 6), (MIXTRAL, 300)]


def randn(*shape, seed=0, dtype=torch.float32, scale=1.0):
    values = torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)
    return (values * scale).to(dtype)


def weights(shape, dtype):
    router = randn(shape.experts, shape.hidden, seed=1, dtype=dtype, scale=2 * shape.hidden**-0.5)
    gate_up = randn(
        shape.experts, 2 * shape.inner, shape.hidden, seed=2, dtype=dtype, scale=2 * shape.hidden**-0.5
    )
    down = randn(shape.experts, shape.hidden, shape.inner, seed=3, dtype=dtype, scale=2 * shape.inner**-0.5)
    return router, gate_up, down


def a_stream(tokens, width, dtype):
    table = randn(max(tokens, 97), width, dtype=dtype)
    ids = torch.arange(tokens, device=DEVICE) * 31 % len(table)
    return projection.embed(ids, table, 1 + 0.3 * randn(width, seed=9, dtype=dtype))


def added(chosen, shape, stream, parts, dtype, *, normalize=True, activation="silu", gain=None):
    if gain is None:
        gain = gain_of(shape, dtype)
    return chosen.add_experts(
        stream, *parts, gain, eps=EPS, count=shape.count, normalize=normalize, activation=activation
    )


def gain_of(shape, dtype):
    return 1 + 0.3 * randn(shape.hidden, seed=7, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "tokens"), CASES, ids=str)
def test_a_mixture_added_to_the_stream(shape, tokens, dtype):
    stream, parts = a_stream(tokens, shape.hidden, dtype), weights(shape, dtype)
    before = stream.residual.clone()
    for normalize, activation in ((True, "silu"), (False, "gelu_tanh")):
        how = {"normalize": normalize, "activation": activation}
        got, want = (added(chosen, shape, stream, parts, dtype, **how) for chosen in (gpu, reference))
        off = gpu.scores(stream, parts[0], EPS) - projection.normalized_product(stream, parts[0], None, EPS)
        assert off.abs().max() < 1e-3
        close(got.residual, want.residual, dtype)
        close(got.scaled, want.scaled, dtype)
        squares = got.residual.float().square().sum(1)
        torch.testing.assert_close(got.squares[:, :tokens].sum(0), squares, rtol=1e-4, atol=1e-4)
    assert torch.equal(stream.residual, before)


def close(got, want, dtype):
    """But for tokens whose last expert is as likely as the next: one in a hundred may have taken that.

    As near as a token's numbers are on the whole: a sum that is rounded to the next one may leave nearly
    nothing with the residual.
    """
    got, want = got.float(), want.float()
    whole = want.square().mean(1, keepdim=True).sqrt().clamp(min=1)
    off = (got - want).abs() > NEAR[dtype]["atol"] * whole + NEAR[dtype]["rtol"] * want.abs()
    assert off.any(1).float().mean() <= (0.0 if dtype is torch.float32 and not CARD else 0.02)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("experts", "count"), [(4, 2), (5, 5), (128, 8), (300, 6), (1, 1)])
def test_the_choice(experts, count, normalize):
    logits = 3 * randn(5, experts)
    logits[1] = 0.5  # of equal ones the first
    logits[2, ::2] = logits[2, 0].clone()
    ids, shares = gpu.choose(logits, count, normalize=normalize)
    want, wanted = reference.choose(logits, count, normalize=normalize)
    assert torch.equal(ids.long(), want)
    torch.testing.assert_close(shares, wanted, atol=1e-6, rtol=1e-5)


def test_a_choice_among_scores_that_are_no_numbers():
    logits = torch.full((3, 6), float("nan"), device=DEVICE)
    logits[0] = randn(6)
    ids, _ = gpu.choose(logits, 2, normalize=True)
    assert torch.equal(ids[0].long(), reference.choose(logits[:1], 2, normalize=True)[0][0])
    assert bool(((ids >= 0) & (ids < 6)).all())


@pytest.mark.parametrize(
    ("tokens", "count", "experts", "size"), [(1, 2, 4, 16), (9, 3, 5, 16), (500, 3, 7, 32)]
)
def test_rows_by_expert(tokens, count, experts, size):
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(0, experts - 1, (tokens, count), generator=generator).int().to(DEVICE)  # one has none
    order, tiles = (found.cpu() for found in gpu.grouped(ids, experts, size))
    flat = ids.flatten().cpu()
    assert torch.equal(order.long(), flat.argsort(stable=True))
    seen = []
    for expert, first, rows in tiles.tolist():
        if expert < 0:
            continue
        assert 1 <= rows <= size
        assert bool((flat[order[first : first + rows].long()] == expert).all())
        seen += range(first, first + rows)
    assert seen == list(range(len(flat)))
    known = (tiles[:, 0] >= 0).int()
    assert torch.equal(known, known.sort(descending=True).values)  # those that are not there come last


@pytest.mark.parametrize(
    ("tokens", "count", "experts"), [(1, 2, 4), (16, 3, 5), (9, 8, 40), (3, 9, 20), (5, 1, 1)]
)
def test_few_tokens_are_grouped_as_they_choose(tokens, count, experts):
    logits = 3 * randn(tokens, experts, seed=tokens)
    weights, order, tiles = gpu.chosen(logits, count, 16, normalize=False)
    ids, shares = gpu.choose(logits, count, normalize=False)
    wanted_order, wanted_tiles = gpu.grouped(ids, experts, 16)
    assert torch.equal(weights, shares) and torch.equal(order, wanted_order)
    known = int((wanted_tiles[:, 0] >= 0).sum())
    assert torch.equal(tiles[:known], wanted_tiles[:known])
    assert bool((tiles[known:, 0] == -1).all())


def test_a_mixture_of_what_is_normalised_already():
    x, (router, gate_up, down) = randn(6, ODD.hidden), weights(ODD, torch.float32)
    logits = x @ router.T
    how = {"count": 3, "normalize": True, "activation": "silu"}
    got, want = (chosen.mix(x, logits, gate_up, down, **how) for chosen in (gpu, reference))
    torch.testing.assert_close(got, want, **NEAR[torch.float32])
    assert gpu.mix(x[:0], logits[:0], gate_up, down, **how).shape == (0, ODD.hidden)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_terms_of_ranks_add_up_to_the_mixture(dtype):
    """Each rank has half of every expert, all of the router, and the same tokens."""
    stream, (router, gate_up, down) = a_stream(7, ODD.hidden, dtype), weights(ODD, dtype)
    how = {"eps": EPS, "count": ODD.count, "normalize": True, "activation": "silu"}
    gate, up = gate_up.chunk(2, 1)
    cut = ODD.inner // 2
    terms = []
    for own in (slice(0, cut), slice(cut, None)):
        parts = router, torch.cat((gate[:, own], up[:, own]), 1).contiguous(), down[..., own].contiguous()
        got, want = (chosen.expert_sums(stream, *parts, **how) for chosen in (gpu, reference))
        close(got, want, dtype)
        terms.append(got.float())
    close(sum(terms).to(dtype), reference.expert_sums(stream, router, gate_up, down, **how), dtype)


def test_many_tokens_go_through_in_parts(monkeypatch):
    stream, parts = a_stream(10, TINY.hidden, torch.float32), weights(TINY, torch.float32)
    whole = added(gpu, TINY, stream, parts, torch.float32)
    monkeypatch.setattr(gpu, "_TOKENS", 4)
    cut = added(gpu, TINY, stream, parts, torch.float32)
    torch.testing.assert_close(cut.residual, whole.residual)
    torch.testing.assert_close(cut.squares[:, :10], whole.squares[:, :10])


def test_a_poisoned_row_is_alone():
    stream, parts = a_stream(5, TINY.hidden, torch.float32), weights(TINY, torch.float32)
    clean = added(gpu, TINY, stream, parts, torch.float32).residual
    stream.scaled[2], stream.squares[:, 2] = float("nan"), float("nan")
    got = added(gpu, TINY, stream, parts, torch.float32).residual
    kept = [0, 1, 3, 4]
    torch.testing.assert_close(got[kept], clean[kept])


def test_tiles_suit_the_rows_of_an_expert():
    assert [gpu.rows_of_a_tile(8 * n, 128, n, 128) for n in (1, 16, 64, 192, 600, 4096)] == [
        16, 16, 16, 32, 64, 128,
    ]  # fmt: skip
    assert gpu.rows_of_a_tile(4096 * 8, 128, 4096, 64) == 64


def test_experts_touched_on_the_average():
    assert expected_experts(128, 8, 1) == 8 and expected_experts(8, 8, 3) == 8
    ids = torch.stack([torch.randperm(128)[:8] for _ in range(6 * 400)]).view(400, -1)
    mean = sum(len(step.unique()) for step in ids) / 400
    assert abs(expected_experts(128, 8, 6) - mean) < 1.5


@pytest.mark.skipif(not CARD, reason="the interpreter multiplies by numpy, whose bits depend on the shape")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "normalize"), [(A3B, True), (A3B, False), (MIXTRAL, True), (ODD, False)])
def test_the_bits_of_a_token_are_its_own(shape, normalize, dtype):
    """Alone and beside others, through every size of tile; the scores' too."""
    stream, parts = a_stream(700, shape.hidden, dtype), weights(shape, dtype)

    def run(begin, end):
        part = type(stream)(
            stream.residual[begin:end], stream.scaled[begin:end], stream.squares[:, begin:end].contiguous()
        )
        got = added(gpu, shape, part, parts, dtype, normalize=normalize)
        return [gpu.scores(part, parts[0], EPS), got.residual, got.scaled, got.squares[:, : end - begin].T]

    whole = run(0, 700)
    for size in (1, 2, 6, 16, 17, 48, 64, 192, 350):
        for begin in (0, 5, 330):
            for got, want in zip(run(begin, begin + size), whole, strict=True):
                assert torch.equal(got, want[begin : begin + size]), (size, begin)


@pytest.mark.skipif(not CARD, reason="no CUDA device")
def test_it_is_captured_whatever_the_router_says():
    stream, parts = a_stream(6, A3B.hidden, torch.bfloat16), weights(A3B, torch.bfloat16)
    gain = gain_of(A3B, torch.bfloat16)  # no generator can be made while capturing
    added(gpu, A3B, stream, parts, torch.bfloat16, gain=gain)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        got = added(gpu, A3B, stream, parts, torch.bfloat16, gain=gain)
    other = a_stream(60, A3B.hidden, torch.bfloat16)
    for mine, theirs in ((stream.residual, other.residual), (stream.scaled, other.scaled)):
        mine.copy_(theirs[-6:])
    stream.squares[:, :6] = other.squares[:, 54:60]
    graph.replay()
    want = added(gpu, A3B, stream, parts, torch.bfloat16)
    assert torch.equal(got.residual, want.residual)
