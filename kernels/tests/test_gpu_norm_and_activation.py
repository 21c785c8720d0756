"""The small kernels in Triton against their references; a row's bits do not depend on the rows beside it."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from specdec_kernels import activation, norm
from specdec_kernels.activation import gpu as gpu_activation
from specdec_kernels.norm import gpu as gpu_norm

CARD = torch.cuda.is_available()
DEVICE = "cuda" if CARD else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if CARD else [torch.float32]
#: Both compute in float32; what is stored may be a rounding apart.
NEAR = {torch.float32: {"atol": 2e-6, "rtol": 2e-6}, torch.bfloat16: {"atol": 1e-2, "rtol": 1e-2}}

pytestmark = [
    pytest.mark.parametrize("dtype", DTYPES, ids=str),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),  # of a gate far below 0, in numpy
]


def randn(*shape, seed=0, dtype=torch.float32):
    values = torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)
    return values.to(dtype)


@pytest.mark.parametrize("size", [7, 64, 576, 4096])
def test_norms(size, dtype):
    x, residual = (randn(3, size, seed=seed, dtype=dtype) for seed in range(2))
    weight = randn(size, seed=2, dtype=dtype)
    torch.testing.assert_close(
        gpu_norm.rms_norm(x, weight, 1e-5), norm.reference.rms_norm(x, weight, 1e-5), **NEAR[dtype]
    )
    got, expected = (
        chosen.fused_add_rms_norm(x, residual, weight, 1e-5) for chosen in (gpu_norm, norm.reference)
    )
    torch.testing.assert_close(got[0], expected[0], **NEAR[dtype])
    assert torch.equal(got[1], expected[1])


def test_norm_of_heads_within_a_fused_projection(dtype):
    heads, weight = randn(3, 6, 32, dtype=dtype)[:, 1:4], randn(32, seed=1, dtype=dtype)
    assert gpu_norm.can_norm(heads, weight)
    torch.testing.assert_close(
        gpu_norm.rms_norm(heads, weight, 1e-6), norm.reference.rms_norm(heads, weight, 1e-6), **NEAR[dtype]
    )


@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_tanh_and_mul"])
def test_activations_far_from_zero_too(name, dtype):
    x = torch.cat([randn(2, 2 * 1100), randn(2, 2 * 1100, seed=1) * 60]).to(dtype)
    x[0, 0] = float("nan")
    got, expected = (getattr(chosen, name)(x) for chosen in (gpu_activation, activation.reference))
    torch.testing.assert_close(got.float(), expected.float(), equal_nan=True, atol=1e-5, rtol=1.6e-2)


def test_what_is_asked_for_goes_to_triton(monkeypatch, dtype):
    """The public functions, where there are no C++ kernels."""
    x, weight = randn(2, 8, dtype=dtype), randn(8, seed=1, dtype=dtype)
    called = []
    for module, name in ((gpu_norm, "rms_norm"), (gpu_activation, "silu_and_mul")):
        monkeypatch.setattr(module, name, lambda *_, name=name: called.append(name))
    monkeypatch.setattr(norm.native, "can_norm", lambda *_: False)
    monkeypatch.setattr(activation.native, "can_gate", lambda *_: False)
    norm.rms_norm(x, weight, 1e-5)
    activation.silu_and_mul(x)
    assert called == ["rms_norm", "silu_and_mul"]


@pytest.mark.parametrize("size", [576, 4096])
def test_a_row_has_the_same_bits_beside_others(size, dtype):
    x, residual = (randn(20, size, seed=seed, dtype=dtype) for seed in range(2))
    weight = randn(size, seed=2, dtype=dtype)
    together = gpu_norm.rms_norm(x, weight, 1e-5), *gpu_norm.fused_add_rms_norm(x, residual, weight, 1e-5)
    for row in range(0, 20, 7):
        ours, rest = x[row : row + 1], residual[row : row + 1]
        alone = gpu_norm.rms_norm(ours, weight, 1e-5), *gpu_norm.fused_add_rms_norm(ours, rest, weight, 1e-5)
        for one, all_of_them in zip(alone, together, strict=True):
            assert torch.equal(one[0], all_of_them[row])
