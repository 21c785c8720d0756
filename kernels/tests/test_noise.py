"""Philox against Random123's known answers; the noise keyed as it says, and independent along each axis."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specdec_kernels.native import loading
from specdec_kernels.noise import GUMBEL_MAX, GUMBEL_MIN, gumbel, native, philox4x32, reference
from specdec_kernels.noise import uniform as uniform_of

torch.set_num_threads(1)
WORD = 0xFFFFFFFF

# tests/kat_vectors of Random123, lines "philox4x32 10": counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def slow_philox(counter, key):
    """The generator in Python integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = p1 >> 32 ^ c1 ^ k0, p1 & WORD, p0 >> 32 ^ c3 ^ k1, p0 & WORD
        k0, k1 = k0 + 0x9E3779B9 & WORD, k1 + 0xBB67AE85 & WORD
    return c0, c1, c2, c3


def int64(*values):
    return torch.tensor(values, dtype=torch.int64)


def keys(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    return seeds, torch.arange(rows) % 3, torch.arange(rows) * 17


def uniform(noise):
    """The probability integral transform of Gumbel noise."""
    return torch.exp(-torch.exp(-noise.double()))


def words(text):
    return tuple(int(word, 16) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, result):
    got = philox4x32(tuple(int64(w) for w in words(counter)), tuple(int64(w) for w in words(key)))
    assert tuple(int(word) for word in got) == words(result) == slow_philox(words(counter), words(key))


@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    index=st.integers(0, WORD),
    position=st.integers(0, WORD),
    token=st.integers(0, 2**20),
    stream=st.integers(0, WORD),
)
@settings(max_examples=100, deadline=None)
def test_key_layout_is_as_documented(seed, index, position, token, stream):
    key = (seed & WORD, seed >> 32 & WORD)
    word = slow_philox((token // 4, position, index, stream), key)[token % 4]
    uniform = (word + 0.5) / 2**32
    got = gumbel(int64(seed), int64(index), int64(position), int64(token), stream=stream)
    # The last float32 below 1 is 2**-24 away: near there the expected value is the clamped one.
    want = -math.log(-math.log1p(-min(uniform, 1 - 2.0**-24)))
    assert float(got) == pytest.approx(want, rel=1e-5, abs=1e-5 + 2.0**-25 / max(1 - uniform, 2.0**-24))


@pytest.mark.parametrize("vocab_size", [1, 3, 4, 5, 300, 4099])
def test_a_value_does_not_depend_on_what_else_is_asked(vocab_size):
    seed, index, position = keys(6)
    whole = gumbel(seed, index, position, vocab_size)
    assert whole.shape == (6, vocab_size) and whole.dtype == torch.float32
    for row in range(6):
        one = slice(row, row + 1)
        assert torch.equal(gumbel(seed[one], index[one], position[one], vocab_size)[0], whole[row])
    for count in (1, 2, 5, 17, 200):
        ids = torch.randint(0, vocab_size, (6, count))
        assert torch.equal(gumbel(seed, index, position, ids), whole.gather(1, ids))
        assert torch.equal(gumbel(seed, index, position, ids[0]), whole[:, ids[0]])
    rows, ids = torch.randint(0, 6, (333,)), torch.randint(0, vocab_size, (333,))
    single = gumbel(seed[rows], index[rows], position[rows], ids[:, None])
    assert torch.equal(single[:, 0], whole[rows, ids])


@pytest.mark.parametrize("form", ["size", "shared", "own"])
def test_chunks_join(monkeypatch, form):
    seed, index, position = keys(23)
    ids = {"size": 50, "shared": torch.arange(50), "own": torch.arange(50).repeat(23, 1)}[form]
    whole = reference.gumbel(seed, index, position, ids)
    monkeypatch.setattr(reference, "_CPU_CHUNK", 60)
    assert torch.equal(reference.gumbel(seed, index, position, ids), whole)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("stream", ["one", "own"])
@pytest.mark.parametrize("form", [1, 3, 300, 40_001, "shared", "own", "apart"])
def test_the_compiled_noise_is_the_references_to_the_bit(form, stream, threads):
    if loading.library() is None:
        pytest.skip("the C++ kernels could not be compiled here")
    seed, index, position = keys(9)
    stream = 7 if stream == "one" else torch.arange(9) * 2**28
    ids = torch.randint(0, 2**31, (9, 5000))
    ids = {"shared": ids[0], "own": ids, "apart": ids[:, ::7]}.get(form, form)
    torch.set_num_threads(threads)
    try:
        assert native.can_draw(seed, index, position, ids, stream)
        compiled = native.gumbel(seed, index, position, ids, stream=stream)
        assert torch.equal(gumbel(seed, index, position, ids, stream=stream), compiled)
        assert torch.equal(reference.gumbel(seed, index, position, ids, stream=stream), compiled)
        if isinstance(form, str) and ids.dim() == 2:
            even = native.uniform(seed, index, position, ids, stream=stream)
            assert torch.equal(reference.uniform(seed, index, position, ids, stream=stream), even)
    finally:
        torch.set_num_threads(1)


def test_what_the_compiled_noise_does_not_take_is_left_to_torch():
    seed, index, position = keys(2)
    assert not native.can_draw(seed, index.int(), position, 5, 0)
    assert not native.can_draw(seed.to("meta"), index, position, 5, 0)


def test_no_rows_and_no_ids():
    none = torch.empty(0, dtype=torch.int64)
    assert gumbel(none, none, none, 7).shape == (0, 7)
    assert gumbel(int64(1), int64(0), int64(0), torch.empty(1, 0, dtype=torch.int64)).shape == (1, 0)


def test_extreme_words_stay_finite_and_the_upper_tail_is_exact():
    words = torch.tensor([0, 1, 2, 1000, 2**31, 2**32 - 1], dtype=torch.int64)
    noise = reference.to_gumbel(words.float())
    assert noise.isfinite().all()
    assert (noise >= GUMBEL_MIN).all() and (noise <= GUMBEL_MAX).all()
    want = [-math.log(-math.log1p(-(w + 0.5) / 2**32)) for w in (0, 1, 2, 1000, 2**31)]
    assert noise[:5].tolist() == pytest.approx(want, rel=1e-6)
    assert noise[0] == noise.max() and noise[-1] == noise.min()


def test_distribution_is_gumbel():
    seed, index, position = keys(64)
    noise = gumbel(seed, index, position, 16384)
    u = uniform(noise).flatten()
    bins = torch.histc(u, bins=1024, min=0.0, max=1.0)
    expected = u.numel() / 1024
    chi_square = float(((bins - expected) ** 2 / expected).sum())
    assert abs(chi_square - 1023) < 6 * math.sqrt(2 * 1023)
    assert float(noise.double().mean()) == pytest.approx(0.5772156649, abs=0.008)
    assert float(noise.double().var()) == pytest.approx(math.pi**2 / 6, abs=0.02)


N = 200_000
FIX = torch.zeros(N, dtype=torch.int64)
RUN = torch.arange(N)
TOKEN = torch.full((N, 1), 5)
AXES = {
    "seed": lambda step, stream: gumbel(RUN * step, FIX, FIX, TOKEN, stream=stream),
    "seed_high": lambda step, stream: gumbel((RUN * step) << 32, FIX, FIX, TOKEN, stream=stream),
    "index": lambda step, stream: gumbel(FIX + 7, RUN * step, FIX, TOKEN, stream=stream),
    "position": lambda step, stream: gumbel(FIX + 7, FIX, RUN * step, TOKEN, stream=stream),
    "token": lambda step, stream: gumbel(FIX[:1] + 7, FIX[:1], FIX[:1], RUN * step, stream=stream).T,
}


def correlation(a, b):
    return float(torch.corrcoef(torch.stack((a, b)))[0, 1])


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("step", [1, 4])
def test_uniform_and_uncorrelated_along_each_axis(axis, step):
    u = uniform(AXES[axis](step, 0))[:, 0]
    bins = torch.histc(u, bins=100, min=0.0, max=1.0)
    chi_square = float(((bins - N / 100) ** 2 / (N / 100)).sum())
    assert abs(chi_square - 99) < 6 * math.sqrt(2 * 99)
    bound = 5 / math.sqrt(N)
    for lag in (1, 2, 3, 4, 5, 16):
        assert abs(correlation(u[:-lag], u[lag:])) < bound, lag
    assert abs(correlation(u, uniform(AXES[axis](step, 1))[:, 0])) < bound


def test_axes_are_not_interchangeable():
    values = {name: make(1, 0)[100:200, 0] for name, make in AXES.items()}
    names = list(values)
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            assert not torch.isin(values[first], values[second]).any(), (first, second)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_gives_the_same_values():
    seed, index, position = keys(9)
    cuda = gumbel(seed.cuda(), index.cuda(), position.cuda(), 5001).cpu()
    torch.testing.assert_close(cuda, gumbel(seed, index, position, 5001), rtol=1e-5, atol=1e-5)


# -- uniform numbers, and a stream for each row -----------------------------------------------------
def test_the_noise_is_made_of_the_uniform_numbers():
    seed, index, position = keys(40)
    ids = torch.arange(40 * 9).view(40, 9)
    value = uniform_of(seed, index, position, ids, stream=3)
    assert value.dtype == torch.float32 and (value > 0).all() and (value < 1).all()
    noise = gumbel(seed, index, position, ids, stream=3)
    torch.testing.assert_close(uniform(noise), 1 - value.double(), rtol=1e-5, atol=1e-6)


def test_extreme_words_are_neither_0_nor_1():
    words = torch.tensor([0, 2**32 - 1], dtype=torch.int64)
    assert reference.to_uniform(words.float()).tolist() == [2.0**-33, 1 - 2.0**-24]


@pytest.mark.parametrize("vocab_size", [50, 3])
def test_a_stream_for_each_row(monkeypatch, vocab_size):
    seed, index, position = keys(23)
    streams = torch.arange(23) * 3
    rows = [
        gumbel(seed[r : r + 1], index[r : r + 1], position[r : r + 1], vocab_size, stream=3 * r)
        for r in range(23)
    ]
    assert torch.equal(gumbel(seed, index, position, vocab_size, stream=streams), torch.cat(rows))
    monkeypatch.setattr(reference, "_CPU_CHUNK", 60)
    assert torch.equal(gumbel(seed, index, position, vocab_size, stream=streams), torch.cat(rows))
