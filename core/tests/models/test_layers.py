"""Layers, loaded and packed, and what they refuse to load."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from specdecode.contract import ConfigError
from specdecode.layers import (
    ColumnParallelLinear,
    QKVParallelLinear,
    RMSNorm,
    RopeConfig,
    RotaryEmbedding,
    RowParallelLinear,
    VocabEmbedding,
)
from specdecode.layers.packed import Int8Weight, NativeWeight, OneDnnWeight, onednn_available

CPU = {"device": torch.device("cpu")}


def randn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layer", [ColumnParallelLinear, RowParallelLinear])
def test_linear_layers_equal_torchs(dtype, bias, layer):
    linear = layer(12, 20, bias=bias, dtype=dtype, **CPU)
    weight, offset, x = randn(20, 12), randn(20), randn(3, 12).to(dtype)
    linear.load("weight", weight)
    if bias:
        linear.load("bias", offset)
    want = F.linear(x, weight.to(dtype), offset.to(dtype) if bias else None)
    torch.testing.assert_close(linear(x), want)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", [NativeWeight, OneDnnWeight, Int8Weight], ids=lambda form: form.__name__)
def test_a_packed_layer_computes_the_same_and_keeps_no_second_copy(form, bias):
    if not onednn_available(torch.bfloat16):
        pytest.skip("no oneDNN product for bfloat16 on this processor")
    linear = ColumnParallelLinear(64, 48, bias=bias, dtype=torch.bfloat16, **CPU)
    linear.load("weight", randn(48, 64))
    if bias:
        linear.load("bias", randn(48))
    x = randn(3, 64).bfloat16()
    want, size = linear(x), linear.num_bytes
    linear.pack(form)
    torch.testing.assert_close(linear(x), want, atol=0.2, rtol=0.05)
    assert linear.weight.numel() == 0
    if form is Int8Weight:
        assert linear.num_bytes < 0.6 * size
    else:
        assert linear.num_bytes == size


def test_fused_parts_stand_one_behind_the_other():
    qkv = QKVParallelLinear(8, 4, 2, 3, bias=True, dtype=torch.float32, **CPU)
    assert qkv.parts == ("q", "k", "v")
    x, want = randn(2, 8), []
    for part, size in (("v", 6), ("q", 12), ("k", 6)):
        weight, bias = randn(size, 8) + ord(part), randn(size)
        qkv.load("weight", weight, part)
        qkv.load("bias", bias, part)
        want.append(F.linear(x, weight, bias))
    v, q, k = want
    torch.testing.assert_close(qkv(x), torch.cat((q, k, v), 1))


def test_linear_layers_refuse_other_shapes():
    qkv = QKVParallelLinear(8, 4, 2, 3, dtype=torch.float32, **CPU)
    with pytest.raises(ValueError, match=r"expected shape \[6, 8\], got \[12, 8\]"):
        qkv.load("weight", randn(12, 8), "k")
    with pytest.raises(ValueError, match=r"expected shape \[12, 8\], got \[1, 8\]"):
        qkv.load("weight", randn(1, 8), "q")
    with pytest.raises(ValueError, match="no bias"):
        qkv.load("bias", randn(24))


def test_embedding():
    embedding = VocabEmbedding(10, 4, dtype=torch.float32, **CPU)
    table = randn(10, 4)
    embedding.load("weight", table)
    got = embedding(torch.tensor([7, 0, 7]))
    assert torch.equal(got, table[[7, 0, 7]])
    assert got.is_contiguous()
    with pytest.raises(ValueError, match="expected shape"):
        embedding.load("weight", randn(4, 10))


def test_norm_refuses_to_broadcast():
    with pytest.raises(ValueError, match="expected shape"):
        RMSNorm(8, 1e-5, dtype=torch.float32, **CPU).load("weight", torch.ones(1))


def rope(**parameters):
    return RopeConfig(head_dim=16, max_position_embeddings=64, parameters={"rope_theta": 100.0, **parameters})


def test_rotary_table():
    table = RotaryEmbedding(rope(), 64, **CPU)
    cos, sin = table(torch.tensor([0, 5]))
    assert cos.shape == (2, 8)
    assert torch.equal(cos[0], torch.ones(8))
    torch.testing.assert_close(sin[1, 0], torch.tensor(5.0).sin())
    torch.testing.assert_close(sin[1, 4], torch.tensor(5.0 / 10.0).sin())  # 100 ** (-8 / 16)


def test_partial_rotary():
    frequencies, _ = rope(partial_rotary_factor=0.5).inverse_frequencies(64)
    assert frequencies.shape == (4,)


def test_the_length_decides_where_frequencies_depend_on_it():
    dynamic = rope(rope_type="dynamic", factor=2.0)
    assert torch.equal(dynamic.inverse_frequencies(10)[0], dynamic.inverse_frequencies(64)[0])
    assert (dynamic.inverse_frequencies(100)[0][1:] < dynamic.inverse_frequencies(64)[0][1:]).all()


def test_an_unknown_rope_type():
    with pytest.raises(ConfigError, match=r"'spiral'.*llama3"):
        rope(rope_type="spiral").inverse_frequencies(10)


def test_models_import_without_transformers():
    code = "import sys, specdecode.models; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
