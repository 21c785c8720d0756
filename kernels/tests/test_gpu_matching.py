"""Prompt lookup in Triton against its torch reference, over short alphabets and looping texts."""

import random

import pytest
import torch

pytest.importorskip("triton")

from specdec_kernels import matching
from specdec_kernels.matching import gpu, reference

ON_A_CARD = torch.cuda.is_available()
DEVICE = "cuda" if ON_A_CARD else "cpu"
ROUNDS = 200 if ON_A_CARD else 40


def assert_matches(history, lengths, limits, **sizes):
    want = reference.match_ngrams(history, lengths, limits=limits, **sizes)
    got = gpu.match_ngrams(history.to(DEVICE), lengths.to(DEVICE), limits=limits.to(DEVICE), **sizes)
    for own, other in zip(got, want, strict=True):
        assert torch.equal(own.cpu(), other)
    return want


@pytest.mark.parametrize("block", [2048, 32], ids=["one program a row", "several"])
def test_random_texts(monkeypatch, block):
    monkeypatch.setattr(gpu, "_BLOCK", block)
    rng = random.Random(block)
    found = 0
    for _ in range(ROUNDS):
        size, shortest, width = rng.randint(1, 90), rng.randint(1, 3), rng.randint(1, 9)
        sizes = {"shortest": shortest, "longest": rng.randint(shortest, 6), "width": width}
        alphabet = rng.choice([1, 2, 3, 9])
        history = torch.tensor([[rng.randrange(alphabet) for _ in range(size)] for _ in range(3)]).int()
        lengths = torch.tensor([rng.randint(1, size) for _ in range(3)])
        limits = torch.tensor([rng.randint(-1, width) for _ in range(3)])
        _, lens, _ = assert_matches(history, lengths, limits, **sizes)
        found += int((lens > 0).sum())
    assert found > ROUNDS / 2


def test_a_row_is_a_slice_of_a_longer_buffer():
    history = torch.randint(0, 3, (4, 200), generator=torch.Generator().manual_seed(0)).int()[:, :150]
    lengths = torch.tensor([150, 149, 2, 60])
    assert_matches(history, lengths, torch.full((4,), 5), shortest=2, longest=5, width=5)


@pytest.mark.skipif(not ON_A_CARD, reason="needs a CUDA device")
def test_long_texts_in_a_graph():
    generator = torch.Generator().manual_seed(0)
    history = torch.randint(0, 40, (8, 100_000), generator=generator).int().cuda()
    lengths = torch.tensor([100_000, 1, 77, 5_000, 99_999, 2048, 2049, 64_000]).cuda()
    limits = torch.full((8,), 5).cuda()
    sizes = {"shortest": 2, "longest": 5, "width": 5}
    matching.match_ngrams(history, lengths, limits=limits, **sizes)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = matching.match_ngrams(history, lengths, limits=limits, **sizes)
    for seed in range(3):
        history.copy_(torch.randint(0, 40, (8, 100_000), generator=generator.manual_seed(seed)).int())
        graph.replay()
        want = reference.match_ngrams(history.cpu(), lengths.cpu(), limits=limits.cpu(), **sizes)
        assert all(torch.equal(own.cpu(), other) for own, other in zip(got, want, strict=True))
