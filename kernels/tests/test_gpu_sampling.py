"""The draw, its thresholds and the noise in Triton, against the torch references."""

import pytest
import torch

pytest.importorskip("triton")

from specdec_kernels import noise, sampling
from specdec_kernels.noise import gpu as noise_gpu
from specdec_kernels.sampling import drawing, gpu, thresholds

ON_A_CARD = torch.cuda.is_available()
DEVICE = "cuda" if ON_A_CARD else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if ON_A_CARD else [torch.float32]
OUT = float("-inf")
#: Rows of the parameters: greedy, plain, each filter, all of them.
ROWS = {
    "temperature": [0.0, 1.0, 0.7, 1.3, 1.0, 0.6],
    "top_k": [5, 0, 40, 0, 0, 20],
    "top_p": [0.5, 1.0, 1.0, 0.9, 1.0, 0.8],
    "min_p": [0.0, 0.0, 0.0, 0.0, 0.1, 0.02],
}

card_only = pytest.mark.skipif(not ON_A_CARD, reason="needs a CUDA device")


def logits(rows, size, seed=0, scale=3.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, size, generator=generator) * scale).to(dtype).to(DEVICE)


def parameters(rows=6, seed=0, **changed):
    values = {name: (own * rows)[:rows] for name, own in ROWS.items()} | changed
    generator = torch.Generator().manual_seed(seed)
    made = {
        "seed": torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator),
        "index": torch.arange(rows) % 3,
    }
    for name, own in values.items():
        made[name] = None if own is None else torch.tensor(own)
    return {name: own if own is None else own.to(DEVICE) for name, own in made.items()}


def positions(count):
    return (torch.arange(count) * 17 + 2**31).to(DEVICE)


def on_cpu(values):
    return {name: own.cpu() if isinstance(own, torch.Tensor) else own for name, own in values.items()}


def draws_of_the_reference(x, where, **kwargs):
    return drawing.draw_tokens(x.cpu(), where.cpu(), **on_cpu(kwargs)).to(DEVICE)


def kept(x, kwargs, rows=1):
    """What the reference keeps of each row, bool ``[N, V]``."""
    own = on_cpu(kwargs)
    filters = [own[name] for name in ("temperature", "top_k", "top_p", "min_p")]
    return drawing._transformed(x.cpu(), *filters, rows) > OUT


def floors_of(x, kwargs, **more):
    names = ("temperature", "top_k", "top_p", "min_p")
    return thresholds.floors(x, **{name: kwargs[name] for name in names}, **more)


def scaled(x, temperature):
    return x.float() / torch.where(temperature == 0, 1.0, temperature)[:, None]


# -- noise ------------------------------------------------------------------------------------------
def test_noise_is_that_of_the_reference():
    key = parameters(3)["seed"], torch.arange(3, device=DEVICE), positions(3)
    own = [value.cpu() for value in key]
    for stream in (0, 7, torch.arange(3, device=DEVICE)):
        told = stream.cpu() if isinstance(stream, torch.Tensor) else stream
        want = noise.reference.gumbel(*own, 333, stream=told)
        got = noise_gpu.gumbel(*key, 333, stream=stream)
        torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=2e-6)
    ids = torch.randint(0, 333, (3, 40), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    whole = noise_gpu.gumbel(*key, 333)
    assert torch.equal(noise_gpu.gumbel(*key, ids), whole.gather(1, ids))
    assert torch.equal(noise_gpu.gumbel(*key, ids[0]), whole[:, ids[0]])


def test_the_sum_with_noise_is_an_addition():
    x, key = logits(2, 70), (parameters(2)["seed"], torch.arange(2, device=DEVICE), positions(2))
    assert torch.equal(noise_gpu.perturb(x, *key, stream=1), x + noise_gpu.gumbel(*key, 70, stream=1))


# -- draws ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens_per_row", [1, 2])
def test_draws_are_those_of_the_reference(dtype, tokens_per_row):
    kwargs = parameters() | {"tokens_per_row": tokens_per_row}
    x, where = logits(6 * tokens_per_row, 1501, dtype=dtype), positions(6 * tokens_per_row)
    assert torch.equal(gpu.draw_tokens(x, where, **kwargs), draws_of_the_reference(x, where, **kwargs))


@pytest.mark.parametrize("missing", [("temperature",), ("top_k", "top_p", "min_p"), ("top_p",)])
def test_what_is_off_for_all_may_be_left_out(missing):
    kwargs = parameters(**dict.fromkeys(missing))
    x, where = logits(6, 200, seed=3), positions(6)
    assert torch.equal(gpu.draw_tokens(x, where, **kwargs), draws_of_the_reference(x, where, **kwargs))


def test_nan_and_rows_without_a_token_draw_nothing():
    x = logits(6, 300)
    x[0, 299] = x[2, 7] = float("nan")
    x[1], x[3] = OUT, OUT
    x[3, 8] = -5.0
    x[5, 3] = float("inf")
    got = gpu.draw_tokens(x, positions(6), **parameters())
    assert got.tolist()[:4] == [-1, -1, -1, 8]
    assert got[5] == 3
    x[4, 0] = float("inf")
    x[4, 5] = float("nan")  # which is found beside what would win
    assert gpu.draw_tokens(x, positions(6), **parameters())[4] == -1


def test_of_equal_scores_the_lowest_id_wins():
    x = torch.zeros(2, 2500, device=DEVICE)
    x[0, [1030, 2400]] = 1.0
    assert gpu.draw_tokens(x, positions(2), **parameters(2, temperature=[0.0, 0.0])).tolist() == [1030, 0]


def test_the_path_by_transforms_draws_the_same_to_the_bit():
    """What is drawn in one call is what temperature, filters, noise and argmax give one by one."""
    kwargs = parameters(rows=5, temperature=[1.0, 0.7, 1.3, 1.0, 0.6])
    x, where = logits(5, 700, seed=5), positions(5)
    y = scaled(x, kwargs["temperature"])
    gpu.keep(y, None, min_p=kwargs["min_p"])
    gpu.keep(y, None, top_k=kwargs["top_k"])
    gpu.keep(y, None, top_p=kwargs["top_p"])
    assert torch.equal(y > OUT, scaled(x, kwargs["temperature"]) >= floors_of(x, kwargs)[:, None])
    scores = noise_gpu.perturb(y, kwargs["seed"], kwargs["index"], where)
    assert torch.equal(gpu.draw_tokens(x, where, **kwargs), sampling.top_scores(scores, 1)[0][:, 0])


def test_only_the_rows_named_are_filtered():
    x = logits(4, 90)
    y, rows = x.clone(), torch.tensor([3, 1], device=DEVICE)
    gpu.keep(y, rows, top_k=torch.tensor([7, 2], device=DEVICE))
    assert (y > OUT).sum(1).tolist() == [90, 2, 90, 7]
    assert torch.equal(y[y > OUT], x[y > OUT])


# -- thresholds -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("block", "aside", "guess"),
    [(8192, 4096, 1024), (128, 32, 16), (128, 16, 200)],
    ids=["as built", "many passes", "a wrong guess"],
)
def test_thresholds_keep_what_a_sort_keeps(monkeypatch, block, aside, guess):
    for name, value in (("BLOCK", block), ("KEPT", aside), ("GUESS", guess)):
        monkeypatch.setattr(thresholds, name, value)
    kwargs = parameters(rows=4, temperature=[1.0, 0.7, 1.3, 0.6], top_k=[300, 40, 0, 20],
                        top_p=[1.0, 0.9, 0.95, 1.0], min_p=[0.0, 0.0, 0.0, 0.05])  # fmt: skip
    x = torch.cat((logits(2, 600, scale=0.05), logits(2, 600, seed=1, scale=6.0)))
    x[3, ::2] = OUT
    x[3] -= 1e4
    got = scaled(x, kwargs["temperature"]) >= floors_of(x, kwargs)[:, None]
    assert torch.equal(got.cpu(), kept(x, kwargs))


def test_thresholds_keep_all_equals_and_always_the_likeliest():
    off = {"temperature": None, "top_k": None, "top_p": None, "min_p": None}
    x = torch.tensor([[5.0, 3, 3, 1, 3], [0.0, -0.0, 0.0, -1, OUT]], device=DEVICE)
    two = torch.tensor([2, 2], device=DEVICE)
    assert floors_of(x, off | {"top_k": two}).tolist() == [3.0, 0.0]
    tiny = torch.tensor([1e-9, 1e-9], device=DEVICE)
    assert floors_of(x, off | {"top_p": tiny}).tolist() == [5.0, 0.0]
    four = torch.tensor([4, 4], device=DEVICE)
    x[1, 2:] = OUT  # two are left, of whom four are to be kept
    assert floors_of(x, off | {"top_k": four}).tolist() == [3.0, OUT]


# -- ranks ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("k", [1, 4])
def test_ranks_are_those_of_the_reference(k):
    x, where, kwargs = logits(6, 5000, seed=2), positions(6), parameters()
    ids, scores = gpu.rank_tokens(x, where, k=k, **kwargs)
    want, values = drawing.rank_tokens(x.cpu(), where.cpu(), k=k, **on_cpu(kwargs))
    assert torch.equal(ids.cpu(), want)
    torch.testing.assert_close(scores.cpu(), values, rtol=1e-5, atol=1e-5)
    assert torch.equal(ids[:, 0], gpu.draw_tokens(x, where, **kwargs))


def test_ranks_of_what_cannot_be_drawn_come_last():
    x = torch.full((1, 90), OUT, device=DEVICE)
    x[0, [70, 20]] = 2.0
    ids, scores = gpu.rank_tokens(x, positions(1), k=4, **parameters(1))
    assert ids.tolist() == [[20, 70, 0, 1]]
    assert scores[0, :2].tolist() == pytest.approx([-0.6931472] * 2) and scores[0, 2:].tolist() == [OUT] * 2


# -- columns that stand for some tokens only --------------------------------------------------------
@pytest.mark.parametrize("k", [1, 3])
def test_a_part_of_the_vocabulary_is_drawn_from_as_the_whole_without_the_rest(k):
    size, some, kwargs, where = 5000, 2300, parameters(), positions(6)
    ids = torch.randperm(size, generator=torch.Generator().manual_seed(9))[:some].to(DEVICE)
    x = logits(6, some, seed=2)
    x[0, [5, 2290]] = 99.0  # equals of a greedy row: the lower id wins, whatever its column
    whole = torch.full((6, size), OUT, device=DEVICE).index_copy_(1, ids, x)
    want, values = drawing.rank_tokens(whole.cpu(), where.cpu(), k=k, **on_cpu(kwargs))
    for got, scores in (
        gpu.rank_tokens(x, where, k=k, ids=ids, **kwargs),
        drawing.rank_tokens(x.cpu(), where.cpu(), k=k, ids=ids.cpu(), **on_cpu(kwargs)),
    ):
        torch.testing.assert_close(scores.cpu(), values, rtol=1e-5, atol=1e-5)
        assert torch.equal(got.cpu()[values > OUT], want[values > OUT])
    for temperature in (kwargs["temperature"], None):
        own = kwargs | {"temperature": temperature}
        drawn = gpu.draw_tokens(x, where, ids=ids, **own)
        assert torch.equal(drawn, draws_of_the_reference(whole, where, **own))
        assert torch.equal(drawn, draws_of_the_reference(x, where, **own, ids=ids))


# -- on a card --------------------------------------------------------------------------------------
@card_only
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_drawn_alike_beside_any_others(dtype):
    rows, size = 192, 128256
    x, where, kwargs = logits(rows, size, dtype=dtype), positions(rows), parameters(rows)
    together = gpu.draw_tokens(x, where, **kwargs)
    ids, scores = gpu.rank_tokens(x, where, k=4, **kwargs)
    floors = floors_of(x, kwargs)
    assert torch.equal(together, draws_of_the_reference(x, where, **kwargs))
    assert torch.equal(ids[:, 0], together)
    for row in range(0, rows, 13):
        own = {name: value[row : row + 1] for name, value in kwargs.items()}
        alone = x[row : row + 1], where[row : row + 1]
        assert torch.equal(gpu.draw_tokens(*alone, **own), together[row : row + 1])
        assert torch.equal(floors_of(alone[0], own), floors[row : row + 1])
        ids_alone, scores_alone = gpu.rank_tokens(*alone, k=4, **own)
        assert torch.equal(ids_alone[0], ids[row]) and torch.equal(scores_alone[0], scores[row])


@card_only
def test_bfloat16_draws_as_its_float32_copy():
    x, where, kwargs = logits(48, 128256, dtype=torch.bfloat16), positions(48), parameters(48)
    assert torch.equal(gpu.draw_tokens(x, where, **kwargs), gpu.draw_tokens(x.float(), where, **kwargs))
    assert torch.equal(floors_of(x, kwargs), floors_of(x.float(), kwargs))


@card_only
@pytest.mark.parametrize("scale", [0.1, 3.0, 12.0])
def test_thresholds_of_a_large_vocabulary(scale):
    x, kwargs = logits(12, 128256, seed=4, scale=scale), parameters(12)
    got = (scaled(x, kwargs["temperature"]) >= floors_of(x, kwargs)[:, None]).cpu()
    # The reference sums probabilities in float32: the last of many equally likely tokens may differ.
    want = kept(x, kwargs)
    assert ((got != want).sum(1) <= 1 + want.sum(1) // 2000).all()


@card_only
def test_a_captured_draw_follows_its_inputs():
    x, where, kwargs = logits(6, 5000), positions(6), parameters()
    gpu.draw_tokens(x, where, **kwargs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = sampling.draw_tokens(x, where, **kwargs)
    for seed in range(3):
        x.copy_(logits(6, 5000, seed=seed))
        kwargs["seed"].copy_(parameters(seed=seed)["seed"])
        graph.replay()
        assert torch.equal(drawn, draws_of_the_reference(x, where, **kwargs))
