"""A KV cache in float8_e4m3fn by the Triton kernels: what is stored, and what attention reads."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from specdec_kernels.attention import AttentionMetadata, gpu
from specdec_kernels.kv_write import gpu as kv_gpu
from specdec_kernels.kv_write import reference as kv_reference
from specdec_kernels.projection import gpu as projection
from specdec_kernels.projection import reference

CARD = torch.cuda.is_available()
DEVICE = "cuda" if CARD else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if CARD else [torch.float32]
FLOAT8 = torch.float8_e4m3fn
HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 64, 16

pytestmark = [
    pytest.mark.parametrize("dtype", DTYPES, ids=str),
    pytest.mark.skipif(CARD and torch.cuda.get_device_capability() < (8, 9), reason="the card has no float8"),
]


def randn(*shape, seed=0, dtype=torch.float32, scale=1.0):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (values * scale).to(dtype).to(DEVICE)


def caches(blocks, dtype=FLOAT8):
    return [torch.zeros(blocks, BLOCK, KV_HEADS, DIM, device=DEVICE).to(dtype) for _ in "kv"]


def test_what_is_stored(dtype):
    keys, values = (randn(40, KV_HEADS, DIM, seed=seed, dtype=dtype, scale=100.0) for seed in (0, 1))
    keys[3, 0, 5], keys[4, 1, 2] = 1e4, -1e4
    slots = torch.randperm(200, generator=torch.Generator().manual_seed(0))[:40].to(DEVICE) + BLOCK
    got, expected = caches(14), caches(14)
    kv_gpu.write_kv(keys, values, *got, slots)
    kv_reference.write_kv(keys, values, *expected, slots)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("length", [5, 200] if CARD else [20])
def test_attention_reads_what_is_stored(length, dtype):
    small = caches(40)
    for seed, cache in enumerate(small):
        cache.copy_(randn(*cache.shape, seed=seed).to(FLOAT8))
    wide = [cache.to(dtype) for cache in small]
    table = (torch.randperm(20, generator=torch.Generator().manual_seed(2)) + 1)[None].to(DEVICE)
    for first in (0, length - 1):
        positions = torch.arange(first, length, device=DEVICE)
        query = randn(length - first, HEADS, DIM, seed=4, dtype=dtype)
        found = []
        for pair in (small, wide):
            meta = AttentionMetadata(
                rows=torch.zeros_like(positions), positions=positions, write_slots=positions + BLOCK,
                base=positions + 1, block_table=table, block_size=BLOCK,
            )  # fmt: skip
            found.append(gpu.paged_attention(query, *pair, meta, scale=DIM**-0.5, window=None))
        torch.testing.assert_close(*found, atol=1e-5 if dtype is torch.float32 else 1e-2, rtol=1e-2)


def test_the_fused_projection_stores_it(dtype):
    tokens, hidden = 5, 64
    stream = reference.stream_of(randn(tokens, hidden, dtype=dtype), randn(hidden, seed=1, dtype=dtype))
    weight = randn((HEADS + 2 * KV_HEADS) * DIM, hidden, seed=2, dtype=dtype, scale=hidden**-0.5)
    angles, positions = randn(100, DIM // 2, seed=3), torch.arange(tokens, device=DEVICE)
    found = []
    for chosen in (projection, reference):
        pair = caches(3)
        query = chosen.project_qkv(
            stream, weight, None, eps=1e-5, cos=angles.cos(), sin=angles.sin(), positions=positions,
            write_slots=positions + BLOCK, key_cache=pair[0], value_cache=pair[1], query_gain=None,
            key_gain=None, rotate=True,
        )  # fmt: skip
        found.append((query, *(part.float() for part in pair)))
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-2, rtol=1.6e-2)
    for got, expected in zip(found[0][1:], found[1][1:], strict=True):
        assert expected.abs().max() > 0.5
        torch.testing.assert_close(got, expected, atol=0.01, rtol=0.13)  # a code apart
