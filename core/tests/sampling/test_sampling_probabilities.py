"""Laws as probabilities: what rows draw from, told; and draws from what was told."""

import math

import pytest
import torch
from specdecode.api.params import SamplingParams
from specdecode.sampling import SampleRow, SamplingBatch, Stream, draw, law, laws_in_order, rank
from specdecode.sampling.laws import chances, draw_from

torch.set_num_threads(1)
VOCAB = 12
LOGITS = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(2)) * 2
PARAMS = [
    {"temperature": 0},
    {},
    {"temperature": 0.5, "top_k": 4},
    {"temperature": 2.0, "top_p": 0.8, "logit_bias": {3: 5.0}},
    {"min_p": 0.2, "allowed_token_ids": [1, 2, 5, 7]},
    {"temperature": 1.3, "top_k": 6, "top_p": 0.9},
]


def row(params, **changes):
    fields = {"seed": 11, "index": 0, "position": 5, "num_output": 0}
    return SampleRow(params=SamplingParams(**params), **fields | changes)


def batch(rows):
    return SamplingBatch.build(rows, VOCAB)


def test_the_law_of_each_row_is_the_one_written_by_hand(exact_law):
    rows = [row(params) for params in PARAMS]
    together = law(LOGITS, batch(rows))
    for place, one in enumerate(rows):
        assert together[place].tolist() == pytest.approx(
            exact_law(LOGITS[place].tolist(), one.params), abs=1e-5
        )
        assert torch.equal(law(LOGITS[place : place + 1], batch([one]))[0], together[place]), (
            "alone, other bits"
        )


def test_a_greedy_row_is_certain_of_the_first_of_equals():
    logits = torch.tensor([[1.0, 4.0, 4.0]])
    assert law(logits, SamplingBatch.build([row({"temperature": 0})], 3)).tolist() == [[0, 1, 0]]


def test_where_nothing_can_be_drawn_the_law_is_zero():
    rows = [row({}), row({"temperature": 0}), row({}), row({})]
    logits = LOGITS[:4].clone()
    logits[0] = logits[1] = -math.inf
    logits[2] = math.nan
    got = law(logits, batch(rows))
    assert not got[:3].any() and float(got[3].sum()) == pytest.approx(1)
    assert draw_from(got, rows).tolist()[:3] == [-1, -1, -1]


def test_a_token_that_a_processor_forces_is_certain():
    def force(logits):
        logits[4] = logits[7] = math.inf
        return logits

    rows = [row({}, process=force)]
    got = law(LOGITS[:1], batch(rows))
    assert got[0].nonzero().flatten().tolist() == [4] == draw(LOGITS[:1], batch(rows)).tolist()


def test_laws_in_order_leave_out_what_was_drawn():
    rows = [row(params, stream=Stream.DRAFT) for params in PARAMS]
    probs = law(LOGITS, batch(rows))
    ids, _ = rank(LOGITS, batch(rows), 3)
    laws = laws_in_order(probs, ids)
    assert laws.shape == (len(rows), 3, VOCAB)
    assert torch.allclose(laws.sum(-1), torch.ones(len(rows), 3))
    assert (laws.gather(-1, ids[..., None]) > 0).all(), "what was drawn had no chance"
    for place in range(1, len(rows)):  # the first is greedy
        left = probs[place].clone()
        for k in range(min(3, int(left.count_nonzero()))):
            assert torch.allclose(laws[place, k], left / left.sum(), atol=1e-6)
            left[ids[place, k]] = 0


def test_where_no_draw_was_made_the_id_is_certain():
    """A greedy row has one draw, top_k=1 as well; the next sibling is not random."""
    for params in ({"temperature": 0}, {"top_k": 1}):
        rows = [row(params)]
        ids, _ = rank(LOGITS[:1], batch(rows), 2)
        laws = laws_in_order(law(LOGITS[:1], batch(rows)), ids)[0]
        assert [own.nonzero().flatten().tolist() for own in laws] == [[token] for token in ids[0].tolist()]


def test_a_draw_from_the_law_is_the_draw():
    rows = [row(PARAMS[place % 6], seed=place, position=place % 7) for place in range(300)]
    logits = LOGITS[torch.arange(300) % 6]
    got = draw_from(law(logits, batch(rows)), rows)
    assert got.tolist() == draw(logits, batch(rows)).tolist()


@pytest.mark.parametrize(
    "stream", [Stream.DRAFT, Stream.ACCEPT, Stream.DRAFT.keyed(5), Stream.DRAFT.keyed(6)]
)
def test_streams_draw_apart(stream):
    count = 400
    target = [row({"temperature": 2.0}, seed=place) for place in range(count)]
    other = [row({"temperature": 2.0}, seed=place, stream=stream) for place in range(count)]
    logits = torch.zeros(count, VOCAB)
    same = int((draw(logits, batch(target)) == draw(logits, batch(other))).sum())
    assert abs(same - count / VOCAB) < 6 * (count / VOCAB) ** 0.5


def test_no_two_streams_share_a_number():
    keyed = [stream.keyed(base) for stream in Stream for base in (None, *range(200), 2**20, 2**29)]
    assert len(set(keyed)) == len(keyed) and max(keyed) < 2**32


def test_chances_are_of_row_and_token():
    rows = [row({}, seed=place, stream=Stream.ACCEPT) for place in range(2000)]
    got = chances(rows, [7] * 2000, torch.device("cpu"))
    assert torch.equal(chances(rows[5:9], [7] * 4, torch.device("cpu")), got[5:9])
    assert float(got.mean()) == pytest.approx(0.5, abs=0.03)
    other = chances(rows, [8] * 2000, torch.device("cpu"))
    assert abs(float(torch.corrcoef(torch.stack((got, other)))[0, 1])) < 0.1
