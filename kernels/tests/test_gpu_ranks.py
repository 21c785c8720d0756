"""Sums over ranks, all of them in one process: on a card as kernels that wait for each other."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from specdec_kernels.projection import gpu, reference
from specdec_kernels.quantized import QuantizedMatrix, words_of
from specdec_kernels.ranks import Mail, sum_over_ranks, words_of_sum
from specdec_kernels.ranks.mail import DONE, NUMBER

CARD = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CARD else "cpu")
DTYPES = [torch.float32, torch.bfloat16] if CARD else [torch.float32]

pytestmark = pytest.mark.parametrize("dtype", DTYPES, ids=str)


class Ranks:
    """Ranks that share memory. Without a card one kernel runs at a time, so all send before anybody waits."""

    def __init__(self, ranks: int, words: int) -> None:
        self.memory = [
            torch.zeros(Mail.shape(ranks, words), dtype=torch.int64, device=DEVICE) for _ in range(ranks)
        ]
        addresses = [memory.data_ptr() for memory in self.memory]
        self.mails = [Mail.of(addresses, rank, words, DEVICE) for rank in range(ranks)]
        self.streams = [torch.cuda.Stream() for _ in range(ranks)] if CARD else []

    def __call__(self, sums):
        """What ``sums(rank, mail)`` gives on each rank."""
        if not CARD:
            for rank, mail in enumerate(self.mails):
                mail.stop.fill_(1)
                sums(rank, mail)
                mail.stop.zero_()
                mail.state[NUMBER] -= 1
            return [sums(rank, mail) for rank, mail in enumerate(self.mails)]
        torch.cuda.synchronize()
        found = []
        for rank, (mail, stream) in enumerate(zip(self.mails, self.streams, strict=True)):
            with torch.cuda.stream(stream):
                found.append(sums(rank, mail))
        torch.cuda.synchronize()
        return found

    @property
    def numbers(self):
        return [int(mail.state[NUMBER]) for mail in self.mails]


def randn(*shape, seed, dtype):
    values = torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)
    return (values.exp() - 1).to(dtype)


def in_order(terms):
    """As one float32 sum after the other, rounded once."""
    total = terms[0].float()
    for term in terms[1:]:
        total = total + term.float()
    return total.to(terms[0].dtype)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_that_follow_each_other(ranks, dtype):
    """Of shapes in turn: what one left in the memory must not be taken for the next one's."""
    together = Ranks(ranks, 1 << 14)
    shapes = [(1, 64), (3, 100), (1, 600), (1, 7), (2, 301), (1, 64), (3, 100)]
    for number, shape in enumerate(shapes, 1):
        terms = [randn(*shape, seed=10 * number + rank, dtype=dtype) for rank in range(ranks)]
        found = together(lambda rank, mail, terms=terms: sum_over_ranks(terms[rank], mail))
        assert all(torch.equal(one, in_order(terms)) for one in found), (number, shape)
        assert together.numbers == [number] * ranks
        assert all(int(mail.state[DONE]) == 0 for mail in together.mails)


def test_a_float16_sum_is_rounded_once(dtype):
    together = Ranks(2, 1 << 12)
    terms = [randn(3, 100, seed=rank, dtype=torch.float16) for rank in range(2)]
    found = together(lambda rank, mail: sum_over_ranks(terms[rank], mail))
    assert all(torch.equal(one, in_order(terms)) for one in found)


@pytest.mark.parametrize("tokens", [1, 2, 48, *([17, 70, 192] if CARD else [])])
@pytest.mark.parametrize(
    ("ranks", "width", "inputs", "bias"), [(2, 64, 48, False), (2, 200, 72, True), (4, 100, 40, True)]
)
def test_a_product_is_summed_as_its_terms_are(ranks, width, inputs, bias, tokens, dtype):
    """Twice, in both halves of the memory; rank 0 has the bias, as row-parallel layers do."""
    together = Ranks(ranks, words_of_sum(tokens, width, dtype))
    gain = randn(width, seed=1, dtype=dtype)
    stream = reference.embed(
        torch.arange(tokens, device=DEVICE) % 7, randn(7, width, seed=2, dtype=dtype), gain
    )
    weights = [randn(width, inputs, seed=3 + rank, dtype=dtype) / inputs for rank in range(ranks)]
    biases = [randn(width, seed=4, dtype=dtype) * (rank == 0) if bias else None for rank in range(ranks)]
    for turn in range(2):
        xs = [randn(tokens, inputs, seed=20 + 10 * turn + rank, dtype=dtype) for rank in range(ranks)]

        def product(rank, mail, xs=xs):
            return gpu.add_product(xs[rank], weights[rank], biases[rank], stream, gain, mail=mail)

        terms = [gpu.product(xs[rank], weights[rank], biases[rank]) for rank in range(ranks)]
        expected = gpu.add(torch.stack(terms), stream, gain)
        for found in together(product):
            assert torch.equal(found.residual, expected.residual)
            assert torch.equal(found.scaled, expected.scaled)
            assert torch.equal(found.squares[:, :tokens], expected.squares[:, :tokens])
    assert together.numbers == [2] * ranks


@pytest.mark.parametrize("form", [("int4", 128), ("fp8", 0)], ids=str)
def test_so_is_a_product_of_quantised_weights(form, dtype):
    """Whose partial sums of squares are of fewer columns, in the one way and in the other."""
    kind, group = form
    together, tokens, width, inputs = Ranks(2, 1 << 12), 3, 96, 512
    gain = randn(width, seed=1, dtype=dtype)
    generator = torch.Generator(DEVICE).manual_seed(2)
    groups = inputs // group if group else 1
    weights = [
        words_of(QuantizedMatrix.random(kind, width, inputs, groups, std=inputs**-0.5, generator=generator))
        for _ in range(2)
    ]
    stream = reference.embed(torch.arange(tokens, device=DEVICE), randn(7, width, seed=3, dtype=dtype), gain)
    xs = [randn(tokens, inputs, seed=20 + rank, dtype=dtype) for rank in range(2)]
    terms = torch.stack([gpu.product(xs[rank], weights[rank], None) for rank in range(2)])
    expected = gpu.add(terms, stream, gain, weights[0])
    assert expected.columns < 64
    of_reference = reference.add(terms, stream, gain, weights[0])
    torch.testing.assert_close(
        expected.squares[:, :tokens], of_reference.squares[:, :tokens], rtol=1e-2, atol=1e-3
    )
    for found in together(
        lambda rank, mail: gpu.add_product(xs[rank], weights[rank], None, stream, gain, mail=mail)
    ):
        assert found.columns == expected.columns
        assert torch.equal(found.residual, expected.residual)
        assert torch.equal(found.squares[:, :tokens], expected.squares[:, :tokens])


def test_who_is_told_to_stop_waits_for_nobody(dtype):
    """The other rank never comes; sums behind it do not wait either, and still are counted."""
    together = Ranks(2, 1 << 12)  # holds the memory
    mail = together.mails[0]
    mail.stop.fill_(1)
    for _ in range(3):
        sum_over_ranks(randn(3, 100, seed=0, dtype=dtype), mail)
    assert int(mail.state[NUMBER]) == 3


@pytest.mark.skipif(not CARD, reason="kernels wait on a card alone")
def test_a_waiting_kernel_is_told_to_stop(dtype):
    together = Ranks(2, 1 << 12)  # holds the memory
    mail = together.mails[0]
    one = torch.ones(1, dtype=torch.int64).pin_memory()
    aside, done = torch.cuda.Stream(), torch.cuda.Event()
    sum_over_ranks(randn(3, 100, seed=0, dtype=dtype), mail)
    done.record()
    assert not done.query()
    with torch.cuda.stream(aside):
        mail.stop.copy_(one, non_blocking=True)
    torch.cuda.synchronize()
    assert int(mail.state[NUMBER]) == 1


@pytest.mark.skipif(not CARD, reason="wants a card")
def test_sums_in_a_graph(dtype):
    """Replayed more often than captured, an odd number of sums in each: halves of the memory go in turn."""
    together = Ranks(2, 1 << 12)
    xs = [randn(5, 100, seed=rank, dtype=dtype) for rank in range(2)]
    together(lambda rank, mail: sum_over_ranks(xs[rank], mail))
    graphs, outs = [], []
    for rank, mail in enumerate(together.mails):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = xs[rank]
            for _ in range(3):
                out = sum_over_ranks(out, mail)
        graphs.append(graph)
        outs.append(out)
    expected = in_order(xs)
    for _ in range(2):
        expected = in_order([expected, expected])
    for turn in range(7):
        for out in outs:
            out.zero_()
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, together.streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, expected) for out in outs), turn
    assert together.numbers == [22, 22]


def test_what_fits(dtype):
    mail = Mail(torch.empty(6, dtype=torch.int64), 2, 64)
    tokens = 2 if dtype is torch.bfloat16 else 1
    assert mail.takes(tokens, 64, dtype)
    assert not mail.takes(tokens + 1, 64, dtype)
    assert not mail.takes(0, 64, dtype)
