"""The C++ kernels against the torch references, and what happens where they cannot be compiled."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specdec_kernels import activation, attention, kv_write, linear, norm, rotary
from specdec_kernels.attention import AttentionMetadata
from specdec_kernels.linear import pack, pack_int8, packed_linear
from specdec_kernels.native import has_int8, library

pytestmark = pytest.mark.skipif(library() is None, reason="the C++ kernels could not be compiled here")

DTYPES = [torch.float32, torch.bfloat16]
#: Of results about 1: a few roundings.
NEAR = {torch.float32: {"atol": 2e-6, "rtol": 2e-6}, torch.bfloat16: {"atol": 1e-2, "rtol": 1e-2}}


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("size", [576, 64, 20, 7])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_of_any_size(dtype, size):
    x, residual, weight = (randn(5, size, seed=seed, dtype=dtype) for seed in range(3))
    weight = weight[0].contiguous()
    torch.testing.assert_close(
        norm.native.rms_norm(x, weight, 1e-5), norm.reference.rms_norm(x, weight, 1e-5), **NEAR[dtype]
    )
    got, expected = (
        chosen.fused_add_rms_norm(x, residual, weight, 1e-5) for chosen in (norm.native, norm.reference)
    )
    torch.testing.assert_close(got[0], expected[0], **NEAR[dtype])
    assert torch.equal(got[1], expected[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_of_heads_within_a_fused_projection(dtype):
    heads = randn(3, 6, 32, dtype=dtype)[:, 1:4]
    weight = randn(32, seed=1, dtype=dtype)
    assert norm.native.can_norm(heads, weight)
    torch.testing.assert_close(
        norm.native.rms_norm(heads, weight, 1e-6), norm.reference.rms_norm(heads, weight, 1e-6), **NEAR[dtype]
    )


@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_tanh_and_mul"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activations_far_from_zero_too(dtype, name):
    x = torch.cat([randn(4, 2 * 24), randn(4, 2 * 24, seed=1) * 60]).to(dtype)
    x[0, 0] = float("nan")
    got, expected = (getattr(chosen, name)(x) for chosen in (activation.native, activation.reference))
    torch.testing.assert_close(
        got, expected, equal_nan=True, atol=1e-2, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5
    )
    assert got[0, 0].isnan()


@pytest.mark.parametrize("rotated", [32, 20, 6])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotary_of_any_width(dtype, rotated):
    heads, angles = randn(3, 7, 32, dtype=dtype)[:, 2:6], randn(3, rotated // 2)
    got, expected = (
        chosen.rotate(heads, angles.cos(), angles.sin()) for chosen in (rotary.native, rotary.reference)
    )
    torch.testing.assert_close(got, expected, **NEAR[dtype])


@pytest.mark.parametrize("rotated", [32, 20])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotating_on_the_way_into_the_cache(dtype, rotated):
    heads, angles, slots = (
        randn(3, 4 + 2 * 2, 32, dtype=dtype),
        randn(3, rotated // 2),
        torch.tensor([5, 0, 6]),
    )
    found = []
    for chosen in (kv_write.native, kv_write.reference):
        caches = [torch.zeros(2, 4, 2, 32, dtype=dtype) for _ in range(2)]
        query = chosen.rotate_and_write_kv(heads, angles.cos(), angles.sin(), *caches, slots)
        found.append([query, *caches])
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, **NEAR[dtype])


def test_writing_in_another_dtype_is_left_to_torch():
    assert not kv_write.native.can_write(randn(1, 1, 4), randn(1, 1, 4), randn(1, 1, 1, 4).bfloat16())


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 40)), min_size=1, max_size=4),
    heads=st.sampled_from([(6, 2), (4, 4), (5, 1)]),
    dims=st.sampled_from([(16, 16), (64, 64), (32, 48), (80, 80)]),
    window=st.sampled_from([None, 1, 17, 64, 70]),
    first=st.integers(0, 3),
    dtype=st.sampled_from(DTYPES),
    threads=st.sampled_from([1, 3]),
)
def test_attention_of_any_batch(lengths, heads, dims, window, first, dtype, threads):
    """Rows of ``past`` computed tokens and ``new`` ones, in scattered blocks."""
    size, blocks = 4, 40
    table = torch.stack(
        [torch.randperm(blocks, generator=torch.Generator().manual_seed(r)) for r in range(len(lengths))]
    )
    rows = torch.cat([torch.full((new,), row) for row, (_, new) in enumerate(lengths)])
    positions = torch.cat([torch.arange(past, past + new) for past, new in lengths])
    keys, values = (
        randn(blocks, size, heads[1], dim, seed=dim + seed, dtype=dtype) for seed, dim in enumerate(dims)
    )
    query = randn(len(rows), heads[0], dims[0], seed=9, dtype=dtype)
    meta = AttentionMetadata(rows, positions, positions, positions + 1, table, size, first=first)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got, expected = (
            chosen.paged_attention(query, keys, values, meta, scale=0.2, window=window)
            for chosen in (attention.native, attention.reference)
        )
    finally:
        torch.set_num_threads(before)
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("shape", [(96, 64), (70, 200), (33, 7), (16, 1)])
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 19])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dense_products_of_any_shape(dtype, bias, rows, shape):
    weight, x = randn(*shape, dtype=dtype), randn(rows, shape[1], seed=1, dtype=dtype)
    offset = randn(shape[0], seed=2) if bias else None
    packed = pack(weight)
    assert torch.equal(packed.unpacked(), weight)
    got, expected = (chosen.dense_linear(x, packed, offset) for chosen in (linear.native, linear.reference))
    tolerance = {"atol": 1e-4, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 0.1, "rtol": 1e-2}
    torch.testing.assert_close(got, expected, **tolerance)


@pytest.mark.skipif(not has_int8(), reason="this processor has no product of bytes")
@pytest.mark.parametrize("shape", [(96, 64), (70, 200), (33, 7), (32, 1024)])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 9, 24])
def test_int8_products_of_any_shape(rows, shape):
    packed, x = pack_int8(randn(*shape)), randn(rows, shape[1], seed=1)
    x[0] *= 1000  # a row of another scale
    offset = randn(shape[0], seed=2)
    got, expected = (chosen.int8_linear(x, packed, offset) for chosen in (linear.native, linear.reference))
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-5)


def test_int8_of_what_is_not_finite_is_nan_in_its_row_alone():
    packed = pack_int8(randn(20, 130))
    x = randn(3, 130, seed=1)
    x[1, 128] = float("inf")
    y = packed_linear(x, packed)
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()


def test_int8_of_zeros_is_zero():
    assert packed_linear(torch.zeros(2, 64), pack_int8(randn(16, 64))).eq(0).all()


SCRIPT = """
import logging, torch
logging.basicConfig(format="%(message)s")
from specdec_kernels.native import library, takes
from specdec_kernels.norm import rms_norm
assert library() is None and not takes(torch.ones(1))
assert torch.allclose(rms_norm(torch.ones(2, 8), torch.ones(8), 0.0), torch.ones(2, 8))
"""


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"SPECDEC_NATIVE": "0"}, ""),
        ({"CXX": "no-such-compiler"}, "no C++ compiler was found"),
        ({"CXX": "false"}, "could not be compiled"),
    ],
)
def test_without_a_compiler_torch_does_the_work(tmp_path, settings, told):
    environment = {**os.environ, "SPECDEC_KERNELS_CACHE": str(tmp_path), **settings}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert told in done.stderr
    assert done.stderr.count("torch's own operations") <= 1  # told once
    assert bool(done.stderr.strip()) == bool(told)
    assert not list(tmp_path.rglob("*.so"))
