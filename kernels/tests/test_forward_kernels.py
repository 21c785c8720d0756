"""The small kernels of a forward pass against their formulas."""

from __future__ import annotations

import math

import pytest
import torch
from specdec_kernels.activation import gelu_tanh_and_mul, silu_and_mul
from specdec_kernels.kv_write import write_kv
from specdec_kernels.norm import fused_add_rms_norm, rms_norm
from specdec_kernels.rotary import apply_rotary

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("implementation")


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_write_kv_touches_its_slots_only():
    keys, values = torch.zeros(5, 4, 2, 3), torch.zeros(5, 4, 2, 6)
    key, value = randn(3, 2, 3), randn(3, 2, 6, seed=1)
    write_kv(key, value, keys, values, torch.tensor([19, 4, 10]))
    for token, (block, offset) in enumerate([(4, 3), (1, 0), (2, 2)]):
        assert torch.equal(keys[block, offset], key[token])
        assert torch.equal(values[block, offset], value[token])
    assert (keys.abs().sum((2, 3)) > 0).sum() == 3
    assert (values.abs().sum((2, 3)) > 0).sum() == 3


def test_write_kv_takes_views_of_a_fused_projection():
    qkv = randn(2, 6, 4)
    keys, values = torch.zeros(2, 2, 1, 4), torch.zeros(2, 2, 1, 4)
    write_kv(qkv[:, 4:5], qkv[:, 5:6], keys, values, torch.tensor([3, 2]))
    assert torch.equal(keys[1, 1, 0], qkv[0, 4])
    assert torch.equal(values[1, 0, 0], qkv[1, 5])


@pytest.mark.parametrize("rotated", [8, 4])
def test_rotary_turns_each_pair_by_its_angle(rotated):
    query, key = randn(3, 4, 8), randn(3, 2, 8, seed=1)
    angles = torch.rand(3, rotated // 2) * 6
    got = apply_rotary(query, key, angles.cos(), angles.sin())
    for x, y in zip((query, key), got, strict=True):
        for t in range(3):
            for i in range(rotated // 2):
                a, b, angle = x[t, :, i], x[t, :, i + rotated // 2], float(angles[t, i])
                torch.testing.assert_close(y[t, :, i], a * math.cos(angle) - b * math.sin(angle))
                torch.testing.assert_close(
                    y[t, :, i + rotated // 2], b * math.cos(angle) + a * math.sin(angle)
                )
        assert torch.equal(y[..., rotated:], x[..., rotated:])


def test_rotary_leaves_its_inputs_and_keeps_dtypes():
    query, key = randn(2, 2, 4, dtype=torch.bfloat16), randn(2, 1, 4, dtype=torch.bfloat16, seed=1)
    before = query.clone()
    angles = torch.ones(2, 2)
    got, _ = apply_rotary(query, key, angles.cos(), angles.sin())
    assert torch.equal(query, before)
    assert got.dtype is torch.bfloat16
    exact, _ = apply_rotary(query.float(), key.float(), angles.cos(), angles.sin())
    assert torch.equal(got, exact.bfloat16())  # rounded once


def test_rms_norm():
    x, weight = randn(3, 7, seed=2), randn(7, seed=3)
    want = x / (x.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-3), want)


def test_rms_norm_in_low_precision_is_computed_in_float32():
    x, weight = randn(2, 512, dtype=torch.bfloat16) * 100, torch.ones(512, dtype=torch.bfloat16)
    got = rms_norm(x, weight, 1e-5)
    assert got.dtype is torch.bfloat16
    torch.testing.assert_close(got.float(), rms_norm(x.float(), weight.float(), 1e-5), atol=1e-2, rtol=4e-3)


def test_fused_add_rms_norm():
    x, residual, weight = randn(3, 8), randn(3, 8, seed=1), randn(8, seed=2)
    before = residual.clone()
    normed, total = fused_add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(x + residual, weight, 1e-5))
    assert torch.equal(residual, before)


def test_gated_activations():
    x = randn(4, 10) * 3
    gate, up = x[:, :5], x[:, 5:]
    torch.testing.assert_close(silu_and_mul(x), gate / (1 + (-gate).exp()) * up)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    torch.testing.assert_close(gelu_tanh_and_mul(x), 0.5 * gate * (1 + inner.tanh()) * up)
