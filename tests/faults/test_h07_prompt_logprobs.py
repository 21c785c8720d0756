"""H07: log-probabilities of the prompt, computed in chunks beside neighbours that draft, cold and warm."""

from __future__ import annotations

import pytest

LENGTHS = (1, 7, 33, 64)
NUM = 3


@pytest.fixture(scope="module")
def asks(fault_lab):
    long = fault_lab.prompt(9)
    return [
        fault_lab.ask(
            long[:length], max_tokens=most, prompt_logprobs=NUM, logprobs=NUM, ignore_eos=True, **law
        )
        for length in LENGTHS
        for most, law in ((1, {}), (8, {"temperature": 0.9, "seed": length}))
    ]


def _target_logprobs(fault_lab, ids):
    from specdecode.testing.reference import dense_forward

    model = fault_lab.lab.model
    hidden, _ = dense_forward(model, ids)
    return model.compute_logits(hidden[:-1]).float().log_softmax(-1)


def _check(fault_lab, prompt, got, want):
    assert len(got) == len(want) == len(prompt)
    assert got[0] is None and want[0] is None
    if len(prompt) < 2:
        return
    for token, mine, theirs, law in zip(
        prompt[1:], got[1:], want[1:], _target_logprobs(fault_lab, prompt), strict=True
    ):
        assert next(iter(mine)) == token and set(mine) == set(theirs)
        for other, entry in mine.items():
            assert entry.logprob == pytest.approx(theirs[other].logprob, abs=1e-4)
            assert entry.logprob == pytest.approx(law[other].item(), abs=1e-4)
            assert entry.rank == theirs[other].rank == 1 + int((law > law[other]).sum())


@pytest.mark.parametrize(
    "drafter",
    [
        "ngram",
        "oracle",
        "ragged",
        "oracle-tree",
        "self-draft",
        "eagle3-grown-tree",
        "medusa",
        "cascade-on-device",
    ],
)
def test_h07_prompt_logprobs_are_right_for_every_request(faults, same, asks, drafter):
    """Twice, so that the second run finds the prefix cache warm, with neighbours that draft throughout."""
    neighbours = [faults.ask(faults.prompt(index), max_tokens=30, ignore_eos=True) for index in range(3)]
    both = neighbours + asks
    want = faults.base(both)
    engine = faults.engine(
        faults.drafter(drafter, faults.texts(both)), max_num_batched_tokens=16, max_num_seqs=5
    )
    for _ in ("cold", "warm"):
        drafted = engine.drafted
        got = engine.generate(both)
        same(got, want)
        if drafter != "ngram":  # which finds nothing to look up in random prompts
            assert engine.drafted > drafted
        for ask, mine, theirs in zip(asks, got[len(neighbours) :], want[len(neighbours) :], strict=True):
            _check(faults, ask.prompt, mine.prompt_logprobs, theirs.prompt_logprobs)
            assert mine.num_cached_tokens == 0  # its log-probabilities want all of it computed
    assert engine.metric("vllm:prefix_cache_hits") > 0  # of the neighbours, the second time
    # Prompts came in chunks: at most 16 tokens a step, twice over.
    assert engine.metric("specdecode:steps") > 2 * sum(map(len, (ask.prompt for ask in both))) / 16
