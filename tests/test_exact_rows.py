"""Invariant rows: with ``exact`` the bits of a token do not depend on what is computed beside it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specdec_kernels.attention import AttentionMetadata, paged_attention, reference
from specdec_kernels.native import library
from specdecode import LLM, SamplingParams
from specdecode.contract import ConfigError
from specdecode.layers.packed import Int8Weight, NativeWeight
from specdecode.testing.tiny import tiny_checkpoint

pytestmark = pytest.mark.skipif(library() is None, reason="the C++ kernels could not be compiled here")

BLOCK, LENGTH = 4, 150


class Case:
    """A row of ``LENGTH`` tokens in scattered or neighbouring blocks, with random keys and queries."""

    def __init__(self, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, *, scattered: bool) -> None:
        generator = torch.Generator().manual_seed(heads + dim)
        blocks = -(-LENGTH // BLOCK) + 20
        shape = (blocks + 1, BLOCK, kv_heads, dim)
        key, value = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
        self.query = torch.randn(LENGTH, heads, dim, generator=generator).to(dtype)
        # the same content whatever the order of the blocks
        order = torch.randperm(blocks, generator=generator) if scattered else torch.arange(blocks)
        self.table = (order + 1)[None]
        self.key, self.value = key.clone(), value.clone()
        self.key[order + 1], self.value[order + 1] = key[1:], value[1:]

    def meta(self, begin: int, end: int) -> AttentionMetadata:
        positions = torch.arange(begin, end)
        return AttentionMetadata(
            rows=torch.zeros_like(positions),
            positions=positions,
            write_slots=torch.zeros_like(positions),
            base=positions + 1,
            block_table=self.table,
            block_size=BLOCK,
        )

    def run(self, begin: int, end: int, window: int | None = None, kernel=paged_attention) -> torch.Tensor:
        query = self.query[begin:end].contiguous()
        return kernel(query, self.key, self.value, self.meta(begin, end), scale=0.2, window=window)


@settings(max_examples=25, deadline=None)
@given(
    cuts=st.lists(st.integers(1, LENGTH - 1), max_size=12, unique=True),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    shape=st.sampled_from([(9, 3, 64), (4, 2, 16), (4, 4, 32)]),
    scattered=st.booleans(),
    window=st.sampled_from([None, 5, 70]),
)
def test_attention_of_a_token_is_its_own(cuts, dtype, shape, scattered, window):
    whole = Case(dtype, *shape, scattered=False).run(0, LENGTH, window)
    case = Case(dtype, *shape, scattered=scattered)
    edges = [0, *sorted(cuts), LENGTH]
    parts = [case.run(begin, end, window) for begin, end in itertools.pairwise(edges)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("window", [None, 5, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_is_the_same_function(dtype, window):
    case = Case(dtype, 4, 2, 16, scattered=True)
    expected = case.run(0, LENGTH, window, reference.paged_attention)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    assert torch.allclose(case.run(0, LENGTH, window).float(), expected.float(), atol=tolerance)


def test_a_node_of_a_tree_has_the_bits_of_its_path():
    """Committed tokens up to 100; nodes in scratch slots, each on a path that skips its siblings."""
    case = Case(torch.float32, 4, 2, 16, scattered=True)
    plain = case.run(0, 104)
    parents = [-1, -1, 0, 1, 3]  # levels 1 1 2 2 3
    on_path = [None, 0, None, 1, 2]  # which plain token (100 + level - 1) a node repeats, if it does
    slots = 100 + torch.arange(5)
    key, value = case.key.flatten(0, 1), case.value.flatten(0, 1)

    def physical(slot: int) -> int:
        return int(case.table[0, slot // BLOCK]) * BLOCK + slot % BLOCK

    true = {
        level: (key[physical(100 + level)].clone(), value[physical(100 + level)].clone())
        for level in range(3)
    }
    queries = torch.zeros(5, 4, 16)
    for node, level in enumerate(on_path):
        if level is None:
            key[physical(100 + node)] = 7.0
            value[physical(100 + node)] = -3.0
        else:
            key[physical(100 + node)], value[physical(100 + node)] = true[level]
            queries[node] = case.query[100 + level]
    extra = torch.full((5, 3), -1)
    positions = torch.zeros(5, dtype=torch.int64)
    for node, parent in enumerate(parents):
        path = [node]
        while parent >= 0:
            path.insert(0, parent)
            parent = parents[parent]
        extra[node, : len(path)] = slots[torch.tensor(path)]
        positions[node] = 99 + len(path)
    meta = AttentionMetadata(
        rows=torch.zeros(5, dtype=torch.int64),
        positions=positions,
        write_slots=torch.zeros(5, dtype=torch.int64),
        base=torch.full((5,), 100),
        block_table=case.table,
        block_size=BLOCK,
        extra=extra,
    )
    out = paged_attention(queries, case.key, case.value, meta, scale=0.2)
    for node, level in enumerate(on_path):
        if level is not None:
            assert torch.equal(out[node], plain[100 + level]), node


@pytest.mark.parametrize("inputs", [64, 576, 1536])
@pytest.mark.parametrize("form", [NativeWeight, Int8Weight], ids=lambda form: form.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_of_a_row_are_its_own(form, dtype, inputs):
    if form is Int8Weight and dtype is not torch.bfloat16:
        pytest.skip("int8 weights compute in bfloat16")
    generator = torch.Generator().manual_seed(inputs)
    weight = torch.randn(96, inputs, generator=generator).to(dtype)
    x = torch.randn(70, inputs, generator=generator).to(dtype)
    product = form(weight, torch.randn(96, generator=generator).to(dtype))
    alone = torch.cat([product(x[row : row + 1]) for row in range(70)])
    for rows in (2, 3, 7, 16, 70):
        together = torch.cat([product(x[start : start + rows]) for start in range(0, 70, rows)])
        assert torch.equal(together, alone), rows


def test_int8_is_near_the_weight_it_was_made_from():
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(64, 128, generator=generator), torch.randn(5, 128, generator=generator)
    weight[3] = 0  # a scale of zero would divide by it
    product = Int8Weight(weight, None)(x.bfloat16()).float()
    expected = x @ weight.t()
    assert (product - expected).abs().max() < 0.03 * expected.abs().max()
    assert product[:, 3].abs().max() == 0


NGRAM = {"method": "ngram", "num_speculative_tokens": 5}
RUNS = [
    {"max_num_seqs": 1},
    {"max_num_batched_tokens": 16, "max_num_seqs": 8},
    {"speculative_config": NGRAM},
    {"speculative_config": NGRAM, "max_num_batched_tokens": 16, "max_num_seqs": 8},
    {"speculative_config": NGRAM, "block_size": 4, "num_gpu_blocks_override": 34, "max_model_len": 100},
]


@pytest.mark.parametrize(
    "weights", [{"dtype": "bfloat16"}, {"quantization": "int8"}, {"dtype": "float32", "exact": True}], ids=str
)
@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_output_is_identical_in_every_dtype(tmp_path, family, weights):
    """Logprobs to the last bit, so that a difference too small to change a token is seen too."""
    path = tiny_checkpoint(tmp_path, family, output_scale=0.3, hidden_size=128, intermediate_size=384)
    rng = np.random.default_rng(0)
    prompts = [
        {"prompt_token_ids": np.resize(rng.integers(3, 259, period), length).tolist()}
        for period, length in ((3, 20), (5, 61), (7, 9), (4, 33), (40, 40))
    ]
    params = [
        SamplingParams(temperature=0.8 if i % 2 else 0.0, seed=i, max_tokens=30, ignore_eos=True, logprobs=2)
        for i in range(len(prompts))
    ]

    def run(**keywords):
        with LLM(path, device="cpu", **weights, **keywords) as llm:
            outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
            accepted = {metric.name: metric.value for metric in llm.get_metrics()}
        return [(o.token_ids, o.logprobs) for o in outputs], accepted

    expected, _ = run()
    for keywords in RUNS:
        found, metrics = run(**keywords)
        assert found == expected, keywords
        if "speculative_config" in keywords:
            assert metrics["vllm:spec_decode_num_accepted_tokens"] > 0


@pytest.mark.parametrize(
    ("keywords", "needles"),
    [
        ({"quantization": "int8", "dtype": "float32"}, ["quantization", "int8", "bfloat16", "float32"]),
        ({"quantization": "int4"}, ["quantization", "int4", "int8"]),
    ],
)
def test_what_cannot_be_packed_is_refused(tmp_path, keywords, needles):
    with pytest.raises(ConfigError) as caught:
        LLM(tiny_checkpoint(tmp_path), device="cpu", **keywords)
    assert all(needle in str(caught.value) for needle in needles)
