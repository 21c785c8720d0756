"""What adapters add, in Triton, against the reference; of a token the same bits whatever stands beside it."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from specdec_kernels.lora import gpu, reference
from specdec_kernels.projection import gpu as fused
from specdec_kernels.projection import reference as plain

CARD = torch.cuda.is_available()
DEVICE = "cuda" if CARD else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if CARD else [torch.float32]
NEAR = {torch.float32: {"atol": 1e-4, "rtol": 1e-4}, torch.bfloat16: {"atol": 2e-2, "rtol": 1.6e-2}}

#: Inputs, outputs of the parts, rank.
CASES = [(64, (64, 32, 32), 8), (100, (72, 40), 16), (600, (150,), 24)]
if CARD:
    CASES += [(4096, (4096, 1024, 1024), 16), (4096, (14336, 14336), 64), (14336, (4096,), 16)]

pytestmark = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def randn(*shape, seed, dtype, scale=1.0):
    values = torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)
    return (values * scale).to(dtype)


def layer(inputs, parts, rank, dtype, slots=3):
    a = randn(slots, len(parts) * rank, inputs, seed=1, dtype=dtype, scale=inputs**-0.5)
    return a, randn(slots, sum(parts), rank, seed=2, dtype=dtype, scale=rank**-0.5)


@pytest.mark.parametrize("tokens", [1, 7, 40])
@pytest.mark.parametrize(("inputs", "parts", "rank"), CASES)
def test_as_the_reference(inputs, parts, rank, tokens, dtype):
    a, b = layer(inputs, parts, rank, dtype)
    x = randn(tokens, inputs, seed=3, dtype=dtype)
    slots = torch.arange(tokens, device=DEVICE) * 5 % 4 - 1
    got = gpu.lora_delta(x, a, b, slots, parts)
    torch.testing.assert_close(got, reference.lora_delta(x, a, b, slots, parts), **NEAR[dtype])
    assert not got[slots < 0].any() and (tokens == 1 or got[slots >= 0].any())


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, of what is spoilt
@pytest.mark.parametrize(("inputs", "parts", "rank"), CASES[1:])
def test_a_token_knows_neither_its_neighbours_nor_other_adapters(inputs, parts, rank, dtype):
    a, b = layer(inputs, parts, rank, dtype)
    x = randn(33, inputs, seed=3, dtype=dtype)
    slots = torch.arange(33, device=DEVICE) % 4 - 1
    together = gpu.lora_delta(x, a, b, slots, parts)
    for row in (1, 2, 20, 32):
        alone = gpu.lora_delta(x[row : row + 1], a, b, slots[row : row + 1], parts)
        assert torch.equal(alone[0], together[row])
    x[slots != 1] = float("nan")
    others = torch.arange(3, device=DEVICE) != 1
    a[others], b[others] = float("inf"), float("nan")
    spoilt = gpu.lora_delta(x, a, b, slots, parts)
    assert torch.equal(spoilt[slots == 1], together[slots == 1])


def test_no_token(dtype):
    a, b = layer(64, (32,), 8, dtype)
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    assert gpu.lora_delta(a.new_empty(0, 64), a, b, none, (32,)).shape == (0, 32)


# -- in the fused products -----------------------------------------------------------------------------
class Layer:
    """The products of a layer of 4 heads on 2, each with what an adapter adds to it."""

    def __init__(self, tokens, dtype, *, hidden=64, inner=48, dim=16, head_norm=False):
        self.stream = plain.embed(
            torch.arange(tokens, device=DEVICE) % 7,
            randn(7, hidden, seed=1, dtype=dtype),
            randn(hidden, seed=2, dtype=dtype),
        )
        self.tokens, self.dim, self.dtype = tokens, dim, dtype
        self.x = randn(tokens, inner, seed=3, dtype=dtype)
        self.gain = randn(hidden, seed=4, dtype=dtype)
        self.head_gain = 1 + 0.3 * randn(dim, seed=5, dtype=dtype) if head_norm else None
        self.weights = {
            name: randn(rows, width, seed=6, dtype=dtype, scale=width**-0.5)
            for name, rows, width in (
                ("qkv", 8 * dim, hidden),
                ("gate", 2 * inner, hidden),
                ("add", hidden, inner),
            )
        }

    def run(self, implementation, weights, deltas):
        """Everything that is computed and stored, of one implementation."""
        angles = randn(512, self.dim // 2, seed=8, dtype=torch.float32)
        places = torch.arange(self.tokens, device=DEVICE)
        caches = [torch.zeros(40, 4, 2, self.dim, device=DEVICE, dtype=self.dtype) for _ in "kv"]
        query = implementation.project_qkv(
            self.stream, weights["qkv"], None, eps=1e-5, cos=angles.cos(), sin=angles.sin(), positions=places,
            write_slots=places, key_cache=caches[0], value_cache=caches[1], query_gain=self.head_gain,
            key_gain=self.head_gain, rotate=True, delta=deltas.get("qkv"),
        )  # fmt: skip
        gated = implementation.project_gate_up(
            self.stream, weights["gate"], None, eps=1e-5, activation="silu", delta=deltas.get("gate")
        )
        stream = implementation.add_product(
            self.x, weights["add"], None, self.stream, self.gain, delta=deltas.get("add")
        )
        return query, *caches, gated, stream.residual, stream.scaled, stream.squares[:, : self.tokens]


@pytest.mark.parametrize("head_norm", [False, True])
@pytest.mark.parametrize("tokens", [1, 70])
def test_products_take_what_is_added(tokens, head_norm, dtype):
    layer = Layer(tokens, dtype, head_norm=head_norm)
    change = {
        name: 0.3 * randn(*w.shape, seed=9, dtype=dtype, scale=w.shape[1] ** -0.5)
        for name, w in layer.weights.items()
    }
    inputs = {"qkv": layer.stream.scaled, "gate": layer.stream.scaled, "add": layer.x}
    deltas = {name: (inputs[name].float() @ change[name].float().T).to(dtype) for name in inputs}
    merged = {name: weight + change[name] for name, weight in layer.weights.items()}
    expected = layer.run(plain, merged, {})
    for implementation in (fused, plain):
        for got, value in zip(layer.run(implementation, layer.weights, deltas), expected, strict=True):
            near = {"atol": 1e-3, "rtol": 1e-3} if dtype is torch.float32 else {"atol": 0.1, "rtol": 0.05}
            torch.testing.assert_close(got, value, **near)


def test_nothing_added_changes_no_bit(dtype):
    layer = Layer(19, dtype)
    sizes = {"qkv": 8 * layer.dim, "gate": 96, "add": 64}
    nothing = {name: torch.zeros(19, size, device=DEVICE, dtype=dtype) for name, size in sizes.items()}
    for name, size in sizes.items():
        nothing[name][3] = randn(size, seed=10, dtype=dtype)
    others = torch.arange(19, device=DEVICE) != 3
    pairs = zip(layer.run(fused, layer.weights, {}), layer.run(fused, layer.weights, nothing), strict=True)
    for index, (without, beside) in enumerate(pairs):
        if index in (1, 2):
            without, beside = (cache.flatten(0, 1)[:19] for cache in (without, beside))
        if index == 6:
            without, beside = without.T, beside.T
        assert torch.equal(without[others], beside[others])
        assert not torch.equal(without[3], beside[3])
