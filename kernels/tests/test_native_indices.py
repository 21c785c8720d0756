"""Kernels read indices by address; a view with gaps, such as a column of a tree's paths, is read as meant."""

from __future__ import annotations

import pytest
import torch
from specdec_kernels import native
from specdec_kernels.attention import AttentionMetadata, paged_attention
from specdec_kernels.attention import reference as attention_reference
from specdec_kernels.kv_write import write_kv

BLOCKS, BLOCK_SIZE, HEADS, DIM = 6, 4, 2, 16

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C++ compiler, so no native kernels")


def spread(indices):
    """The same indices as a view whose elements do not lie one behind the other."""
    if indices.dim() == 1:
        return torch.stack((indices, torch.zeros_like(indices)), dim=1)[:, 0]
    return indices.T.contiguous().T


def test_slots_with_gaps():
    slots = spread(torch.tensor([9, 2, 17]))
    assert not slots.is_contiguous()
    key, value = torch.randn(2, 3, HEADS, DIM)
    caches = [torch.zeros(BLOCKS, BLOCK_SIZE, HEADS, DIM) for _ in range(2)]
    write_kv(key, value, *caches, slots)
    for cache, written in zip(caches, (key, value), strict=True):
        flat = cache.flatten(0, 1)
        torch.testing.assert_close(flat[[9, 2, 17]], written)
        assert flat.abs().sum() == written.abs().sum()


@pytest.mark.parametrize("extra", [None, [[-1, 9, -1], [8, 9, 10], [8, 11, -1]]], ids=["causal", "tree"])
def test_metadata_with_gaps(extra):
    torch.manual_seed(0)
    query = torch.randn(3, 2 * HEADS, DIM)
    caches = [torch.randn(BLOCKS, BLOCK_SIZE, HEADS, DIM) for _ in range(2)]
    indices = {
        "rows": torch.tensor([0, 1, 1]),
        "positions": torch.tensor([5, 8, 9]),
        "write_slots": torch.zeros(3, dtype=torch.int64),
        "base": torch.tensor([6, 7, 8]),
        "block_table": torch.tensor([[3, 1, 2], [5, 4, 2]]),
        "extra": None if extra is None else torch.tensor(extra),
    }
    plain = AttentionMetadata(**indices, block_size=BLOCK_SIZE)
    spaced = AttentionMetadata(
        **{name: None if index is None else spread(index) for name, index in indices.items()},
        block_size=BLOCK_SIZE,
    )
    want = attention_reference.paged_attention(query, *caches, plain, scale=0.25, window=None)
    got = paged_attention(query, *caches, spaced, scale=0.25, window=None)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
