"""A grammar's mask in the sampler: as ``allowed_token_ids`` would be, and with them, in any batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from specdecode.api.params import SamplingParams
from specdecode.sampling import SampleRow, SamplingBatch, draw, rank, transform
from specdecode.sampling.mask import TokenMask

VOCAB = 41
KINDS = [
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 3},
    {"top_p": 0.6, "min_p": 0.01},
    {"temperature": 0.0, "min_tokens": 9, "stop_token_ids": [5, 6]},
    {"logit_bias": {3: 50.0, 4: -100.0}},
]


def mask_of(ids) -> TokenMask:
    return TokenMask.of(np.packbits(np.isin(np.arange(48), ids), bitorder="little").tobytes(), VOCAB)


def row(params, mask=None, **changes) -> SampleRow:
    fields = {"seed": 3, "index": 0, "position": 5, "num_output": 0, "mask": mask}
    return SampleRow(params=params, **fields | changes)


def build(rows) -> SamplingBatch:
    return SamplingBatch.build(rows, VOCAB, "cpu")


def test_it_is_what_allowed_token_ids_are():
    rng = np.random.default_rng(1)
    for _ in range(40):
        logits = torch.from_numpy(rng.normal(size=(len(KINDS), VOCAB))).float()
        sets = [sorted(rng.choice(VOCAB, rng.integers(1, 9), replace=False).tolist()) for _ in KINDS]
        masked = [row(SamplingParams(**kind), mask_of(ids)) for kind, ids in zip(KINDS, sets, strict=True)]
        listed = [
            row(SamplingParams(**kind, allowed_token_ids=ids)) for kind, ids in zip(KINDS, sets, strict=True)
        ]
        assert torch.equal(transform(logits, build(masked)), transform(logits, build(listed)))
        assert torch.equal(draw(logits, build(masked)), draw(logits, build(listed)))
        for ours, theirs in zip(rank(logits, build(masked), 4), rank(logits, build(listed), 4), strict=True):
            assert torch.equal(ours, theirs)


def test_a_row_alone_equals_the_row_in_a_batch_of_masked_and_free_ones():
    rng = np.random.default_rng(2)
    logits = torch.from_numpy(rng.normal(size=(8, VOCAB))).float()
    rows = [
        row(SamplingParams(**KINDS[n % len(KINDS)]), mask_of(rng.choice(VOCAB, 7)) if n % 3 else None, seed=n)
        for n in range(8)
    ]
    together = transform(logits, build(rows))
    for n in range(8):
        assert torch.equal(transform(logits[n : n + 1], build([rows[n]]))[0], together[n])


@pytest.mark.parametrize(
    ("allowed", "mask", "left"),
    [
        (None, [5, 6], [5, 6]),  # nothing but stops: one of them must come
        (None, [4, 5, 6], [4]),
        ([4, 5], [5, 7], [5]),  # together they leave a stop only
        ([4, 5], [4, 5, 7], [4]),
        ([4], [5], []),
    ],
)
def test_min_tokens_never_excludes_the_last_one(allowed, mask, left):
    params = SamplingParams(temperature=0, min_tokens=9, stop_token_ids=[5, 6], allowed_token_ids=allowed)
    (out,) = transform(torch.zeros(1, VOCAB), build([row(params, mask_of(mask))]))
    assert (out > -torch.inf).nonzero()[:, 0].tolist() == left


def test_a_processor_sees_the_mask_and_cannot_overrule_it():
    seen = []

    def zeros(logits: torch.Tensor) -> torch.Tensor:
        seen.append((logits > -torch.inf).nonzero()[:, 0].tolist())
        return torch.zeros_like(logits)

    rows = [
        row(SamplingParams(temperature=0), mask_of([7, 9]), process=zeros),
        row(SamplingParams(temperature=0)),
    ]
    out = transform(torch.ones(2, VOCAB), build(rows))
    assert seen == [[7, 9]]
    assert (out[0] > -torch.inf).nonzero()[:, 0].tolist() == [7, 9] and out[0, 7] == 0
    assert torch.equal(out[1], torch.ones(VOCAB))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_masks_the_same_tokens():
    rng = np.random.default_rng(3)
    logits = torch.from_numpy(rng.normal(size=(4, VOCAB))).float()
    rows = [row(SamplingParams(seed=n), mask_of(rng.choice(VOCAB, 9)) if n else None) for n in range(4)]
    here = transform(logits, build(rows))
    there = transform(logits.cuda(), SamplingBatch.build(rows, VOCAB, "cuda"))
    assert torch.equal(here > -torch.inf, there.cpu() > -torch.inf)
