"""A KV cache in float8_e4m3fn: what is stored, what attention reads, in all three implementations."""

from __future__ import annotations

import pytest
import torch
from specdec_kernels.attention import AttentionMetadata, paged_attention
from specdec_kernels.kv_write import move_slots, rotate_and_write_kv, write_kv

FLOAT8 = torch.float8_e4m3fn
HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 16, 4


def caches(blocks=9):
    return [torch.zeros(blocks, BLOCK, KV_HEADS, DIM, dtype=FLOAT8) for _ in "kv"]


def expected(x):
    return x.float().clamp(-448, 448).to(FLOAT8).float()


def test_every_rounding_is_torchs(implementation):
    """All halves of neighbouring codes and what lies beside them, subnormals, too large ones, and NaN."""
    codes = torch.arange(127, dtype=torch.uint8).view(FLOAT8).float()
    middle = (codes[1:] + codes[:-1]) / 2
    near = torch.cat(
        [codes, middle, middle * (1 + 1e-6), middle * (1 - 1e-6), torch.tensor([449.0, 1e9, 1e-9])]
    )
    values = torch.cat([near, -near, torch.tensor([float("nan"), float("inf")])])
    values = torch.cat([values, torch.zeros(-len(values) % (KV_HEADS * DIM))]).view(-1, KV_HEADS, DIM)
    tokens = len(values)
    key_cache, value_cache = caches(tokens // BLOCK + 2)
    slots = torch.arange(tokens) + BLOCK
    write_kv(values, -values, key_cache, value_cache, slots)
    for cache, source in ((key_cache, values), (value_cache, -values)):
        got = cache.flatten(0, 1).float()[slots]
        assert torch.equal(got.nan_to_num(7), expected(source).nan_to_num(7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_reads_what_is_stored(implementation, dtype):
    """The same as from a cache of the model's dtype that holds the rounded values."""
    if implementation == "triton" and dtype is torch.bfloat16:
        pytest.skip("the interpreter has no bfloat16")
    generator = torch.Generator().manual_seed(0)
    length = 30
    heads = torch.randn(length, HEADS + 2 * KV_HEADS, DIM, generator=generator).to(dtype)
    angles = torch.randn(length, DIM // 2, generator=generator)
    table = (torch.randperm(8, generator=generator) + 1)[None]
    positions = torch.arange(length)
    slots = table[0][positions // BLOCK] * BLOCK + positions % BLOCK
    meta = AttentionMetadata(
        rows=torch.zeros(length, dtype=torch.int64), positions=positions, write_slots=slots,
        base=positions + 1, block_table=table, block_size=BLOCK,
    )  # fmt: skip
    small, wide = caches(), [cache.to(dtype) for cache in caches()]
    query = rotate_and_write_kv(heads, angles.cos(), angles.sin(), *small, slots)
    plain = rotate_and_write_kv(heads, angles.cos(), angles.sin(), *wide, slots)
    torch.testing.assert_close(query, plain)
    for stored, source in zip(small, wide, strict=True):
        torch.testing.assert_close(stored.float(), expected(source), atol=0.002, rtol=0.13)  # a code apart
        source.copy_(stored.to(dtype))
    got = paged_attention(query, *small, meta, scale=0.25)
    near = {"atol": 1e-5, "rtol": 1e-4} if dtype is torch.float32 else {"atol": 1e-2, "rtol": 1e-2}
    torch.testing.assert_close(got, paged_attention(query, *wide, meta, scale=0.25), **near)


def test_slots_move(implementation):
    pairs = [tuple(caches()) for _ in range(2)]
    for seed, cache in enumerate(part for pair in pairs for part in pair):
        cache.copy_(torch.randn(cache.shape, generator=torch.Generator().manual_seed(seed)).to(FLOAT8))
    before = [[part.view(torch.uint8).clone().flatten(0, 1) for part in pair] for pair in pairs]
    source, destination = torch.tensor([5, 9, 6]), torch.tensor([9, 5, 20])
    move_slots(pairs, source, destination)
    for pair, old in zip(pairs, before, strict=True):
        for part, was in zip(pair, old, strict=True):
            was[destination] = was[source]
            assert torch.equal(part.view(torch.uint8).flatten(0, 1), was)
