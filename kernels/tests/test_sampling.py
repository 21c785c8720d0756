"""The transforms one by one: thresholds, ties, rows that are left alone; the draw; the ranking."""

import math

import pytest
import torch
from specdec_kernels import sampling
from specdec_kernels.noise import gumbel

torch.set_num_threads(1)
OUT = float("-inf")


def logits(*rows):
    return torch.tensor(rows, dtype=torch.float32)


def random_logits(rows, size, seed=0, scale=4.0):
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * scale


def kept(x):
    return [torch.nonzero(row > OUT)[:, 0].tolist() for row in x]


def int64(*values):
    return torch.tensor(values, dtype=torch.int64)


def test_top_k_keeps_ties_at_the_threshold():
    x = logits([5, 3, 3, 1, 3], [1, 2, 3, 4, 5], [0, 0, 0, 0, 0])
    sampling.keep_top_k(x, None, int64(2, 1, 1), 2)
    assert kept(x) == [[0, 1, 2, 4], [4], [0, 1, 2, 3, 4]]


def test_top_k_touches_only_its_rows():
    x = random_logits(4, 50)
    before = x.clone()
    sampling.keep_top_k(x, int64(1, 3), int64(3, 50), 50)
    assert [len(k) for k in kept(x)] == [50, 3, 50, 50]
    assert torch.equal(x[[0, 2, 3]], before[[0, 2, 3]])
    assert kept(x)[1] == sorted(before[1].argsort(descending=True)[:3].tolist())


def test_top_p_keeps_the_smallest_sufficient_set():
    x = logits([0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4]).log()
    sampling.keep_top_p(x, None, torch.tensor([0.79, 0.71]))
    assert kept(x) == [[0, 1], [1, 2, 3]]


def test_top_p_keeps_ties_and_always_the_likeliest():
    x = logits([1, 1, 1, 0], [9, 1, 1, 0])
    sampling.keep_top_p(x, None, torch.tensor([0.01, 1e-6]))
    assert kept(x) == [[0, 1, 2], [0]]


def test_top_p_next_to_one_keeps_all():
    x = random_logits(3, 3000, scale=0.1)
    sampling.keep_top_p(x, None, torch.full((3,), 1 - 2.0**-24))
    assert [len(k) for k in kept(x)] == [3000] * 3


@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0])
def test_top_p_beyond_the_head_equals_a_full_sort(scale):
    """A flat row needs more than the head that is sorted first; its neighbour does not."""
    x = torch.cat((random_logits(1, 5000, scale=scale), random_logits(1, 5000, scale=8.0)))
    p = torch.tensor([0.9, 0.9])
    want = []
    for row in x:
        order = row.argsort(descending=True, stable=True)
        mass = row.double().softmax(-1)[order].cumsum(-1)
        want.append(sorted(order[: int((mass < 0.9).sum()) + 1].tolist()))
    alone = x[1:].clone()
    sampling.keep_top_p(x, None, p)
    sampling.keep_top_p(alone, None, p[1:])
    assert kept(x) == want
    assert torch.equal(alone[0], x[1])


def test_min_p_is_relative_to_the_likeliest():
    x = logits([0.5, 0.24, 0.26], [0.2, 0.7, 0.1], [0.4, 0.4, 0.2]).log()
    sampling.keep_min_p(x, None, torch.tensor([0.5, 0.2, 1.0]))
    assert kept(x) == [[0, 2], [0, 1], [0, 1]]


def test_keep_and_ban():
    x = random_logits(3, 5)
    before = x.clone()
    sampling.keep_tokens(x, int64(0, 2), int64(0, 0, 2), int64(1, 3, 4))
    sampling.ban_tokens(x, int64(1, 1), int64(0, 2))
    assert kept(x) == [[1, 3], [1, 3, 4], [4]]
    assert torch.equal(x[x > OUT], before[x > OUT])


def test_keep_bits():
    x = random_logits(3, 19)
    before = x.clone()
    bits = torch.tensor([[0b10000010, 0, 0b100], [0, 0xFF, 0xF8]], dtype=torch.uint8)
    sampling.keep_bits(x, int64(2, 0), bits)
    assert kept(x) == [[*range(8, 16)], [*range(19)], [1, 7, 18]]
    assert torch.equal(x[x > OUT], before[x > OUT])
    both = before[[2, 0]]
    sampling.keep_bits(both, None, bits)
    assert torch.equal(both, x[[2, 0]])


def test_bias_adds_and_cannot_bring_back():
    x = logits([1, OUT, 3])
    sampling.add_bias(x, int64(0, 0), int64(1, 2), torch.tensor([100.0, -2.0]))
    assert x.tolist() == [[1, OUT, 1]]


def test_penalties():
    x = logits([2, -2, 2, 5], [2, -2, 2, 5])
    sampling.penalize(
        x,
        int64(0, 0, 0, 1),
        int64(0, 1, 2, 0),
        torch.tensor([3.0, 1.0, 0.0, 2.0]),
        presence=torch.tensor([0.5, 0.0]),
        frequency=torch.tensor([0.25, 1.0]),
        repetition=torch.tensor([2.0, 1.0]),
    )
    assert x.tolist() == [[1 - 0.75 - 0.5, -4 - 0.25 - 0.5, 1, 5], [0, -2, 2, 5]]


def test_penalties_leave_excluded_tokens_excluded():
    x = logits([OUT, 1])
    one = torch.tensor([2.0])
    sampling.penalize(x, int64(0), int64(0), one, presence=one, frequency=one, repetition=one)
    assert x.tolist() == [[OUT, 1]]


@pytest.mark.parametrize("best", [1, 3])
@pytest.mark.parametrize("left", [1, 2, 7, 400])
def test_noise_for_the_able_alone_changes_no_result(best, left):
    x = random_logits(8, 400)
    if left < 400:
        sampling.keep_top_k(x, None, torch.full((8,), left), left)
    key = (torch.arange(8) * 999 - 4, torch.arange(8) % 2, torch.arange(8) + 10)
    plain = x + gumbel(*key, 400)
    scores = sampling.perturb(x, *key, best=best)
    for got, want in zip(sampling.top_scores(scores, best), sampling.top_scores(plain, best), strict=True):
        assert torch.equal(got, want)


def test_noise_reaches_far_below_the_likeliest_and_no_farther():
    """A logit the noise could lift over the top keeps its noise; one it could not is dropped."""
    x = torch.full((1, 64), OUT)
    x[0, :3] = torch.tensor([0.0, -25.0, -26.0])
    scores = sampling.perturb(x, int64(0), int64(0), int64(0))
    assert kept(scores) == [[0, 1]]


def test_noise_reaches_whatever_may_be_second_best():
    x = torch.full((1, 64), OUT)
    x[0, :4] = torch.tensor([0.0, -40.0, -41.0, -90.0])
    key = (int64(0), int64(0), int64(0))
    assert kept(sampling.perturb(x, *key)) == [[0]]
    assert kept(sampling.perturb(x, *key, best=2)) == [[0, 1, 2]]
    assert kept(sampling.perturb(x, *key, best=5)) == [[0, 1, 2, 3]]


def test_perturb_leaves_its_input():
    x = random_logits(2, 30)
    before = x.clone()
    sampling.perturb(x, int64(1, 2), int64(0, 0), int64(3, 4))
    assert torch.equal(x, before)


def test_streams_are_independent():
    x = torch.zeros(1, 2000)
    key = (int64(1), int64(0), int64(0))
    a, b = (sampling.perturb(x, *key, stream=s)[0] for s in (0, 1))
    assert abs(float(torch.corrcoef(torch.stack((a, b)))[0, 1])) < 0.12
    assert torch.equal(a, gumbel(*key, 2000)[0])


@pytest.mark.parametrize("k", [1, 2, 5])
def test_top_scores_break_ties_by_the_lowest_id(k):
    x = logits([1, 2, 2, -1, 2], [-0.0, 0.0, -3, 0.0, -0.0], [OUT, 4, OUT, OUT, OUT])
    want = [[1, 2, 4, 0, 3], [0, 1, 3, 4, 2], [1, 0, 2, 3, 4]]
    ids, values = sampling.top_scores(x, k)
    assert ids.tolist() == [row[:k] for row in want]
    assert torch.equal(values, x.gather(-1, ids))


def test_top_scores_order_random_rows():
    x = random_logits(5, 3000)
    ids, values = sampling.top_scores(x, 40)
    assert torch.equal(values, x.sort(dim=-1, descending=True).values[:, :40])
    assert torch.equal(x.gather(-1, ids), values)


def test_log_normalizer():
    x = random_logits(4, 999)
    x[0, 5:] = OUT
    torch.testing.assert_close(sampling.log_normalizer(x), x.logsumexp(-1), rtol=1e-5, atol=1e-5)


def test_gumbel_top_k_is_sampling_without_replacement():
    """The second best has the law of a second draw after the first is taken out."""
    probs, trials = [0.6, 0.3, 0.1], 20_000
    x = torch.tensor([probs]).log().expand(trials, 3).contiguous()
    key = (
        torch.arange(trials),
        torch.zeros(trials, dtype=torch.int64),
        torch.zeros(trials, dtype=torch.int64),
    )
    ids, _ = sampling.top_scores(sampling.perturb(x, *key, best=2), 2)
    pairs = torch.bincount(ids[:, 0] * 3 + ids[:, 1], minlength=9) / trials
    for i, p in enumerate(probs):
        for j, q in enumerate(probs):
            want = 0.0 if i == j else p * q / (1 - p)
            assert abs(float(pairs[3 * i + j]) - want) < 5 * math.sqrt(want / trials) + 1e-12, (i, j)
