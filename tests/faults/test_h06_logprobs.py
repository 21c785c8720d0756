"""H06: one entry of log-probabilities a token, with the target's own numbers, however the token came."""

from __future__ import annotations

import math

import pytest

K = 4
NUM = 5
LAWS = ({}, {"temperature": 0.8, "seed": 11})


def _target_logprobs(fault_lab, ids, start):
    """``[N, V]`` teacher-forced log-softmax of the tokens ``ids[start:]``."""
    from specdecode.testing.reference import dense_forward

    model = fault_lab.lab.model
    hidden, _ = dense_forward(model, ids)
    return model.compute_logits(hidden[start - 1 : -1]).float().log_softmax(-1)


@pytest.fixture(scope="module")
def asks(fault_lab):
    return [
        fault_lab.ask(fault_lab.prompt(index), max_tokens=24, ignore_eos=True, logprobs=NUM, **law)
        for index, law in enumerate((*LAWS, *LAWS))
    ]


@pytest.fixture(scope="module")
def expected(fault_lab, asks):
    """For each request BASE's output and the target's log-probabilities behind it."""
    outputs = fault_lab.base(asks)
    return outputs, [
        _target_logprobs(fault_lab, ask.prompt + list(output.outputs[0].token_ids), len(ask.prompt))
        for ask, output in zip(asks, outputs, strict=True)
    ]


def _check(completion, logprobs):
    """Entries are those of ``logprobs`` ``[N, V]``."""
    assert len(completion.logprobs) == len(completion.token_ids)
    chosen = []
    for token, entry, law in zip(completion.token_ids, completion.logprobs, logprobs, strict=True):
        assert next(iter(entry)) == token
        assert len(entry) in (NUM, NUM + 1)
        assert set(law.topk(NUM).indices.tolist()) | {token} == set(entry)
        for other, shown in entry.items():
            assert shown.logprob == pytest.approx(law[other].item(), abs=1e-4)
            assert shown.rank == 1 + int((law > law[other]).sum())
        chosen.append(entry[token].logprob)
    assert completion.cumulative_logprob == pytest.approx(math.fsum(chosen), abs=1e-4)


def test_h06_values_are_the_targets(faults, same, asks, expected, drafter):
    outputs, laws = expected
    late = drafter in ("spoiled", "oracle-tree", "cascade-on-device")
    engine = faults.engine(faults.drafter(drafter, faults.texts(asks), K), async_scheduling=late)
    got = engine.generate(asks)
    same(got, outputs)
    for output, law in zip(got, laws, strict=True):
        _check(output.outputs[0], law)


@pytest.mark.parametrize("offset", [*range(K), None], ids=[*(f"offset{i}" for i in range(K)), "bonus-slot"])
def test_h06_accepted_recovered_and_bonus_tokens(faults, asks, expected, offset):
    """Each kind of token in each slot: accepted before ``offset``, recovered there, or a bonus."""
    outputs, laws = expected
    texts = [
        ask.prompt + list(output.outputs[0].token_ids) for ask, output in zip(asks, outputs, strict=True)
    ]
    spoiled = [] if offset is None else [offset]
    engine = faults.engine(faults.drafter("oracle", texts, K) | {"wrong_at": spoiled})
    reached = K if offset is None else offset
    for output, law in zip(engine.generate(asks), laws, strict=True):
        (completion,) = output.outputs
        _check(completion, law)
        block = ["draft"] * reached + ["target"]
        assert completion.token_sources[1 : 1 + 2 * len(block)] == block * 2


def test_h06_a_drafters_own_numbers_are_not_shown(faults, asks, expected):
    """A drafter that is certain of each draft: nothing of its probability 1 reaches the entries."""
    _, laws = expected
    config = {"method": "faults-puppet", "num_speculative_tokens": K, "token": 9, "texts": faults.texts(asks)}
    for output, law in zip(faults.engine(config).generate(asks), laws, strict=True):
        (completion,) = output.outputs
        _check(completion, law)
        assert "draft" in completion.token_sources
        chosen = zip(completion.token_ids, completion.logprobs, strict=True)
        assert all(entry[token].logprob < 0 for token, entry in chosen)
