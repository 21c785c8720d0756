"""TokenHistory against a Counter; seeds that do not repeat; log-probabilities and ranks."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specdecode.api.params import SamplingParams
from specdecode.sampling import TokenHistory, UnseededStream, gather_logprobs, needs_history, resolve_seed

IDS = st.lists(st.integers(0, 40), max_size=30)


def as_dict(pair):
    ids, counts = pair
    assert len(set(ids.tolist())) == len(ids)
    return dict(zip(ids.tolist(), counts.tolist(), strict=True))


@given(prompt=IDS, outputs=st.lists(IDS, max_size=4), path=IDS)
@settings(max_examples=150, deadline=None)
def test_history_counts_like_a_counter(prompt, outputs, path):
    history = TokenHistory(prompt)
    seen: list[int] = []
    for chunk in outputs:
        history.extend(chunk)
        seen += chunk
        want = dict.fromkeys(prompt, 0) | Counter(seen)
        assert as_dict(history.counts()) == want and len(history) == len(want)
        assert as_dict(history.counts(path)) == dict.fromkeys(prompt, 0) | Counter(seen + path)
        assert as_dict(history.counts()) == want, "a path leaves no trace"


def test_history_grows():
    history = TokenHistory(np.array([5, 5, 3]))
    for token in range(1000):
        history.extend([token])
    assert as_dict(history.counts()) == dict.fromkeys(range(1000), 1)


@pytest.mark.parametrize(
    ("fields", "needed"),
    [
        ({}, False),
        ({"temperature": 0, "top_k": 3}, False),
        ({"presence_penalty": -0.1}, True),
        ({"frequency_penalty": 0.1}, True),
        ({"repetition_penalty": 1.01, "temperature": 0}, True),
    ],
)
def test_needs_history(fields, needed):
    assert needs_history(SamplingParams(**fields)) is needed


def test_unseeded_requests_never_share_a_seed():
    stream = UnseededStream(0)
    seeds = [resolve_seed(None, stream) for _ in range(50_000)]
    assert len(set(seeds)) == len(seeds)
    assert torch.tensor(seeds).dtype == torch.int64
    assert 0.48 < np.mean([seed < 0 for seed in seeds]) < 0.52


def test_the_engines_seed_fixes_the_stream_and_neighbours_differ():
    first, again, other = ([s.next() for _ in range(2000)] for s in map(UnseededStream, (0, 0, 1)))
    assert first == again
    assert not set(first) & set(other)
    # An engine's seed one stride of SplitMix64 on must not give the same seeds one request on.
    shifted = UnseededStream(0x9E3779B97F4A7C15)
    assert not set(first) & {shifted.next() for _ in range(2000)}
    assert UnseededStream().next() != UnseededStream().next()


def test_seeds_of_users():
    stream = UnseededStream(0)
    assert resolve_seed(7, stream) == 7
    assert resolve_seed(-2, stream) == -2
    assert resolve_seed(2**64 - 2, stream) == -2
    assert resolve_seed(2**64 + 7, stream) == 7
    assert resolve_seed(2**63, stream) == -(2**63)
    untouched = UnseededStream(0)
    assert resolve_seed(-1, stream) == untouched.next(), "-1 is no seed, and the others took none"


@pytest.mark.parametrize("num", [0, 1, 5, -1, 500])
def test_logprobs_equal_a_plain_computation(num):
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(0)) * 3
    chosen = [0, 29, int(logits[2].argmax()), int(logits[3].argmin())]
    want = logits.double().log_softmax(-1)
    count = 30 if num in (-1, 500) else num
    for row, token, got in zip(want, chosen, gather_logprobs(logits, chosen, num), strict=True):
        order = row.argsort(descending=True).tolist()
        expected = [token] + [other for other in order[:count] if other != token]
        assert list(got.token_ids) == expected
        assert list(got.ranks) == [order.index(other) + 1 for other in expected]
        assert list(got.logprobs) == pytest.approx(row[expected].tolist(), abs=1e-5)


def test_logprobs_of_equal_tokens_share_a_rank():
    logits = torch.tensor([[1.0, 3.0, 1.0, 3.0, 0.0]])
    (got,) = gather_logprobs(logits, torch.tensor([2]), 4)
    assert got.token_ids == (2, 1, 3, 0)
    assert got.ranks == (3, 1, 1, 3)


def test_logprobs_are_of_the_raw_distribution():
    logits = torch.tensor([[0.0, float("-inf"), 1.0]])
    (got,) = gather_logprobs(logits, [1], 1)
    assert got.logprobs[0] == float("-inf") and got.ranks == (3, 1)
