"""Each row as it would be alone: against a slow reference, in any batch, drawn and ranked."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specdec_kernels.noise import gumbel
from specdecode.api.params import SamplingParams
from specdecode.sampling import SampleRow, SamplingBatch, TokenHistory, draw, needs_history, rank, transform

VOCAB = 16
TOKENS = st.integers(0, VOCAB - 1)
# Multiples of 1/8, and parameters that keep them exact in float32: ties are ties in both.
EIGHTHS = st.integers(-64, 64).map(lambda n: n / 8)
PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        "top_p": st.sampled_from([0.0137, 0.3137, 0.5519, 0.9023]),
        "top_k": st.sampled_from([-1, 0, 1, 3, VOCAB - 1, VOCAB, 99]),
        "min_p": st.sampled_from([0.0113, 0.31, 1.0]),
        "presence_penalty": st.sampled_from([-1.5, 0.5]),
        "frequency_penalty": st.sampled_from([-0.25, 1.0]),
        "repetition_penalty": st.sampled_from([0.5, 2.0, 4.0]),
        "logit_bias": st.dictionaries(TOKENS, st.sampled_from([-100.0, -1.0, 0.5]), max_size=4),
        "allowed_token_ids": st.lists(TOKENS, min_size=1, max_size=8, unique=True),
        "stop_token_ids": st.lists(TOKENS, max_size=3),
        "min_tokens": st.integers(0, 6),
    },
)


@st.composite
def described_rows(draw_from):
    return {
        "logits": draw_from(st.lists(EIGHTHS, min_size=VOCAB, max_size=VOCAB)),
        "params": SamplingParams(**draw_from(PARAMS)),
        "prompt": draw_from(st.lists(TOKENS, min_size=1, max_size=6)),
        "output": draw_from(st.lists(TOKENS, max_size=6)),
        "path": tuple(draw_from(st.lists(TOKENS, max_size=4))),
        "stop_ids": tuple(draw_from(st.lists(TOKENS, max_size=2))),
        "seed": draw_from(st.integers(-(2**63), 2**63 - 1)),
    }


def sample_row(described):
    history = None
    if needs_history(described["params"]):
        history = TokenHistory(described["prompt"])
        history.extend(described["output"])
    count = len(described["output"]) + len(described["path"])
    fields = {name: described[name] for name in ("params", "path", "stop_ids", "seed")}
    fields |= {"index": 1, "position": len(described["prompt"]) + count, "num_output": count}
    return SampleRow(history=history, **fields)


def row(params, **changes):
    fields = {"seed": 3, "index": 0, "position": 5, "num_output": 0}
    return SampleRow(params=params, **fields | changes)


def build(rows, vocab_size=VOCAB):
    return SamplingBatch.build(rows, vocab_size, "cpu")


@given(st.lists(described_rows(), min_size=1, max_size=5))
@settings(max_examples=300, deadline=None)
def test_transform_equals_the_slow_reference(exact_law, exact_logits, described):
    logits = torch.tensor([d["logits"] for d in described])
    before = logits.clone()
    got = transform(logits, build([sample_row(d) for d in described]))
    assert torch.equal(logits, before) and got.dtype == torch.float32
    for out, d in zip(got, described, strict=True):
        output = [*d["output"], *d["path"]]
        past = (d["params"], d["prompt"], output, len(output), d["stop_ids"])
        if d["params"].greedy:
            np.testing.assert_array_equal(out.numpy(), exact_logits(d["logits"], *past))
        else:
            want = np.array(exact_law(d["logits"], *past))
            assert (out > -torch.inf).tolist() == (want > 0).tolist()
            np.testing.assert_allclose(out.softmax(-1).numpy(), want, atol=1e-5)


@given(st.lists(described_rows(), min_size=2, max_size=5))
@settings(max_examples=100, deadline=None)
def test_a_row_alone_equals_the_row_in_a_batch(described):
    logits = torch.tensor([d["logits"] for d in described])
    rows = [sample_row(d) for d in described]
    batch = build(rows)
    together = (transform(logits, batch), draw(logits, batch), *rank(logits, batch, 4))
    for i, lone in enumerate(rows):
        one, single = logits[i : i + 1], build([lone])
        alone = (transform(one, single), draw(one, single), *rank(one, single, 4))
        for a, b in zip(alone, together, strict=True):
            assert torch.equal(a[0], b[i])


MIXED = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.9, top_p=0.9),
    SamplingParams(),
    SamplingParams(top_k=40, presence_penalty=0.5),
    SamplingParams(temperature=0, repetition_penalty=1.3),
    SamplingParams(temperature=1.7, min_p=0.05, top_p=0.999, frequency_penalty=0.2),
    SamplingParams(top_k=2000, top_p=0.99, temperature=3.0),
]


def mixed_rows(vocab_size):
    history = TokenHistory(range(0, vocab_size, 7))
    history.extend(range(0, vocab_size, 31))
    return [
        row(p, seed=-i, index=i % 2, position=50 + i, num_output=4, history=history, path=(3, 3, 9))
        for i, p in enumerate(MIXED)
    ]


@pytest.mark.parametrize("vocab_size", [3001, 49152])
def test_large_rows_alone_equal_large_rows_in_a_batch(vocab_size):
    """Beyond the sizes at which reductions are split and sorts are cut short."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(len(MIXED), vocab_size, generator=generator) * 3
    rows = mixed_rows(vocab_size)
    batch = build(rows, vocab_size)
    together = (transform(logits, batch), draw(logits, batch), *rank(logits, batch, 4))
    for i, lone in enumerate(rows):
        one, single = logits[i : i + 1], build([lone], vocab_size)
        alone = (transform(one, single), draw(one, single), *rank(one, single, 4))
        for a, b in zip(alone, together, strict=True):
            assert torch.equal(a[0], b[i])


@pytest.mark.parametrize("spread", [4.0, 60.0])
@pytest.mark.parametrize("vocab_size", [300, 3001])
def test_draw_is_the_plain_rule(vocab_size, spread):
    """However little noise is made, the result is argmax(transformed + noise of every token)."""
    rows = mixed_rows(vocab_size)
    for trial in range(20):
        logits = torch.randn(len(rows), vocab_size, generator=torch.Generator().manual_seed(trial)) * spread
        batch = build(rows, vocab_size)
        scores = transform(logits, batch)
        for i, r in enumerate(rows):
            if not r.params.greedy:
                key = (torch.tensor([word]) for word in (r.seed, r.index, r.position))
                scores[i] += gumbel(*key, vocab_size)[0]
        assert draw(logits, batch).tolist() == scores.argmax(-1).tolist()
        ids, ranked = rank(logits, batch, 5)
        normalizer = transform(logits, batch).logsumexp(-1, keepdim=True)
        torch.testing.assert_close(ranked, scores.sort(-1, descending=True).values[:, :5] - normalizer)
        torch.testing.assert_close(scores.gather(-1, ids) - normalizer, ranked)
        assert torch.equal(ids[:, 0], draw(logits, batch))


def test_greedy_takes_the_lowest_of_equal_ids_and_ignores_truncation():
    params = SamplingParams(temperature=0, top_k=1, top_p=0.1, min_p=1.0)
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0]])
    batch = build([row(params)], 4)
    assert draw(logits, batch).tolist() == [1]
    ids, scores = rank(logits, batch, 4)
    assert ids.tolist() == [[1, 2, 0, 3]]
    torch.testing.assert_close(scores, logits.log_softmax(-1).gather(-1, ids))


def test_greedy_rows_are_not_scaled_beside_sampled_ones():
    rows = [row(SamplingParams(temperature=5e-6)), row(SamplingParams(temperature=0.5))]
    logits = torch.randn(2, 9)
    assert torch.equal(transform(logits, build(rows, 9)), logits * torch.tensor([[1.0], [2.0]]))


def test_all_greedy_rows_cost_no_copy_of_the_logits():
    logits = torch.randn(2, 9)
    batch = build([row(SamplingParams(temperature=0))] * 2, 9)
    assert transform(logits, batch) is logits
    assert batch.leaves_logits and batch.noise is None


def test_rank_beyond_the_support():
    ids, scores = rank(torch.randn(1, 6), build([row(SamplingParams(top_k=2))], 6), 4)
    assert len(set(ids[0].tolist())) == 4
    assert scores.isfinite().tolist() == [[True, True, False, False]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_worked_on_in_float32(dtype):
    logits = (torch.randn(3, 50) * 3).to(dtype)
    rows = [row(SamplingParams(temperature=t)) for t in (0.0, 0.7, 1.0)]
    for batch in (build(rows, 50), build(rows[:1] * 3, 50)):
        assert transform(logits, batch).dtype == torch.float32
        assert torch.equal(draw(logits, batch), draw(logits.float(), batch))


def test_min_tokens_never_leaves_a_row_without_a_token():
    params = SamplingParams(min_tokens=4, allowed_token_ids=[2, 5])
    batch = build([row(params, stop_ids=(2, 5, 7)), row(params, stop_ids=(2,))], 9)
    got = transform(torch.zeros(2, 9), batch)
    assert [torch.nonzero(r > -torch.inf)[:, 0].tolist() for r in got] == [[2, 5], [5]]


def test_penalties_without_history_are_an_error():
    with pytest.raises(ValueError, match="row 0 has penalties and needs its TokenHistory"):
        build([row(SamplingParams(presence_penalty=1))])


def test_logits_of_another_shape_are_an_error():
    with pytest.raises(ValueError, match=r"logits must be \[1, 16\], got \[2, 16\]"):
        draw(torch.zeros(2, 16), build([row(SamplingParams())]))


def test_no_rows():
    batch = build([])
    assert draw(torch.zeros(0, VOCAB), batch).shape == (0,)
    assert rank(torch.zeros(0, VOCAB), batch, 3)[0].shape == (0, 3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_draws_the_same_tokens():
    logits = torch.randn(len(MIXED), 3001, generator=torch.Generator().manual_seed(5)) * 3
    rows = mixed_rows(3001)
    host, card = build(rows, 3001), SamplingBatch.build(rows, 3001, "cuda")
    assert torch.equal(draw(logits.cuda(), card).cpu(), draw(logits, host))
    ids, scores = rank(logits.cuda(), card, 4)
    assert torch.equal(ids.cpu(), rank(logits, host, 4)[0])
    torch.testing.assert_close(scores.cpu(), rank(logits, host, 4)[1], rtol=1e-4, atol=1e-4)
