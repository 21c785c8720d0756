"""H08: a seed gives the same tokens in any company; n > 1 gives n outputs; greedy rows stay greedy."""

from __future__ import annotations

import pytest

LENGTH = 20


@pytest.fixture(scope="module")
def company(fault_lab):
    """The request that is asked for, and five neighbours: two seeded, one unseeded, two greedy."""
    ask, prompt = fault_lab.ask, fault_lab.prompt
    own = ask(prompt(3), temperature=1.0, seed=7, max_tokens=LENGTH, ignore_eos=True)
    laws = (
        {"temperature": 1.0, "seed": 8},
        {"temperature": 0.7, "seed": 7},
        {"temperature": 1.0, "seed": None},
        {},
        {},
    )
    others = [
        ask(prompt(index % 4), max_tokens=LENGTH + index, ignore_eos=True, **law)
        for index, law in enumerate(laws)
    ]
    return own, others


def _ids(outputs):
    return [[list(completion.token_ids) for completion in output.outputs] for output in outputs]


def test_h08_a_seed_alone_and_in_company(faults, company, drafter):
    """Alone, before and behind five neighbours: one output. So it is for the seeded and greedy neighbours."""
    own, others = company
    ((want,), *solos) = _ids(faults.base([own])) + [_ids(faults.base([other]))[0] for other in others]
    texts = faults.texts([own, *others])
    late = drafter in ("oracle", "ngram", "cascade-on-device")
    engine = faults.engine(
        faults.drafter(drafter, texts), async_scheduling=late, max_num_batched_tokens=40, max_num_seqs=8
    )
    assert _ids(engine.generate([own])) == [[want]]
    first = _ids(engine.generate([own, *others]))
    last = _ids(engine.generate([*reversed(others), own]))[::-1]
    for outputs in (first, last):
        assert outputs[0] == [want]
        for other, got, solo in zip(others, outputs[1:], solos, strict=True):
            assert got == solo or (other.params.seed is None and other.params.temperature)
    assert first[3] != last[3]  # the unseeded one never repeats


def test_h08_n_completions(faults, drafter):
    """n=3 with a seed: three outputs, indexed, reproducible; greedy: three copies of BASE."""
    seeded = faults.ask(faults.prompt(1), temperature=1.0, seed=5, n=3, max_tokens=LENGTH, ignore_eos=True)
    greedy = faults.ask(faults.prompt(2), n=3, max_tokens=LENGTH, ignore_eos=True)
    asks = [seeded, greedy]
    want = _ids(faults.base(asks))
    engine = faults.engine(faults.drafter(drafter, faults.texts(asks)))
    for _ in range(2):
        outputs = engine.generate(asks)
        assert _ids(outputs) == want
        assert [completion.index for output in outputs for completion in output.outputs] == [0, 1, 2] * 2
    assert len(set(map(tuple, want[0]))) == 3
    assert len(set(map(tuple, want[1]))) == 1


@pytest.mark.parametrize("drafter", ["ngram", "self-draft", "eagle3"])
def test_h08_unseeded_requests_share_no_stream(faults, drafter):
    ask = faults.ask(faults.prompt(1), temperature=1.0, n=2, max_tokens=LENGTH, ignore_eos=True)
    engine = faults.engine(faults.drafter(drafter, [], 4))
    outputs = [run for output in engine.generate([ask, ask]) for run in _ids([output])[0]]
    assert len(set(map(tuple, outputs))) == 4
