"""The FlashInfer backend against a stand-in of the package that computes what it was told; not on a card."""

from __future__ import annotations

import importlib.util
import types

import pytest
import torch
from specdec_kernels.attention import AttentionMetadata, reference
from specdecode.contract.errors import ConfigError
from specdecode.layers.flashinfer_backend import FlashInferBackend, flashinfer_backend

BLOCK, KV_HEADS, HEADS, DIM = 4, 2, 4, 8


class Wrapper:
    """``BatchPrefillWithPagedKVCacheWrapper`` as documented, row by row."""

    plans = 0

    def __init__(self, workspace, layout):
        assert layout == "NHD" and workspace.dtype is torch.uint8

    def plan(
        self, *, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads,
        num_kv_heads, head_dim_qk, head_dim_vo, page_size, sm_scale, q_data_type, kv_data_type,
        custom_mask=None, causal=False, window_left=-1,
    ):  # fmt: skip
        assert (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, page_size) == (
            HEADS,
            KV_HEADS,
            DIM,
            DIM,
            BLOCK,
        )
        assert q_data_type is kv_data_type is torch.float32
        assert all(
            x.dtype is torch.int32
            for x in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        )
        assert custom_mask is None or (custom_mask.dtype is torch.bool and not causal)
        Wrapper.plans += 1
        self.scale, self.rows = sm_scale, []
        begin = 0
        for row, last in enumerate(paged_kv_last_page_len.tolist()):
            pages = paged_kv_indices[paged_kv_indptr[row] : paged_kv_indptr[row + 1]].long()
            tokens = slice(int(qo_indptr[row]), int(qo_indptr[row + 1]))
            slots, count = (len(pages) - 1) * BLOCK + last, tokens.stop - tokens.start
            if causal:
                own = torch.arange(slots - count, slots)[:, None]
                mask = torch.arange(slots) <= own
                if window_left >= 0:
                    mask &= torch.arange(slots) >= own - window_left
            else:
                mask = custom_mask[begin : begin + count * slots].view(count, slots)
                begin += count * slots
            self.rows.append((tokens, pages, slots, mask))

    def run(self, query, cache):
        out = torch.empty_like(query)
        for tokens, pages, slots, mask in self.rows:
            keys, values = (
                x[pages].flatten(0, 1)[:slots].repeat_interleave(HEADS // KV_HEADS, 1) for x in cache
            )
            scores = torch.einsum("thd,shd->hts", query[tokens], keys) * self.scale
            out[tokens] = torch.einsum(
                "hts,shd->thd", scores.masked_fill(~mask, -torch.inf).softmax(-1), values
            )
        return out


@pytest.fixture
def backend():
    Wrapper.plans = 0
    return FlashInferBackend(
        types.SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper), torch.device("cpu")
    )


def batch(rows, *, first=0, seed=0):
    """Rows of ``(base, tree slots)`` a token; a row may have no tokens."""
    generator = torch.Generator().manual_seed(seed)
    seen = [token for row in rows for token in row]
    widest = max(len(tree) for _, tree in seen)
    meta = AttentionMetadata(
        rows=torch.tensor([index for index, row in enumerate(rows) for _ in row]),
        positions=torch.tensor([base - 1 + len(tree) for base, tree in seen]),
        write_slots=torch.zeros(len(seen), dtype=torch.int64),
        base=torch.tensor([base for base, _ in seen]),
        block_table=torch.randperm(6 * len(rows), generator=generator).view(len(rows), 6),
        block_size=BLOCK,
        first=first,
        extra=torch.tensor([[*tree, *[-1] * (widest - len(tree))] for _, tree in seen]) if widest else None,
    )
    cache = tuple(torch.randn(6 * len(rows), BLOCK, KV_HEADS, DIM, generator=generator) for _ in range(2))
    return torch.randn(len(seen), HEADS, DIM, generator=generator), cache, meta


def causal(start, count):
    return [(slot + 1, []) for slot in range(start, start + count)]


TREE = [(10, slots) for slots in ([], [10], [11], [10, 12], [10, 12, 13])]


@pytest.mark.parametrize("window", [None, 3, 12])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(
    "rows", [[causal(7, 3), [], causal(0, 5), causal(15, 1)], [TREE, causal(4, 2), [(0, [])]]]
)
def test_it_is_told_what_the_tokens_see(backend, rows, first, window):
    query, cache, meta = batch(rows, first=first)
    got = backend.attend(query, cache, meta, scale=0.3, window=window)
    want = reference.paged_attention(query, *cache, meta, scale=0.3, window=window)
    torch.testing.assert_close(got, want)


def test_a_step_is_planned_once_for_all_layers_of_a_window(backend):
    one, two = batch([causal(7, 3)]), batch([causal(9, 2)], seed=1)
    for query, cache, meta in (one, one, two, two, one):
        for window in (None, 4, None):
            got = backend.attend(query, cache, meta, scale=0.3, window=window)
            torch.testing.assert_close(
                got, reference.paged_attention(query, *cache, meta, scale=0.3, window=window)
            )
    assert Wrapper.plans == 6


def test_no_tokens(backend):
    query, cache, meta = batch([causal(7, 3)])
    assert backend.attend(query[:0], cache, meta, scale=0.3, window=None).shape == (0, HEADS, DIM)


def test_what_it_does_not_do_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install flashinfer-python"):
        flashinfer_backend(torch.device("cuda"), torch.bfloat16)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    for device, dtype in (("cuda", torch.float32), ("cpu", torch.bfloat16)):
        with pytest.raises(ConfigError, match="leave attention_backend out"):
            flashinfer_backend(torch.device(device), dtype)
