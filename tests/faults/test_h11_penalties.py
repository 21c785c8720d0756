"""H11: penalties count every accepted token, and no rejected one."""

from __future__ import annotations

import pytest

K = 5
LENGTH = 64
PENALTIES = (
    {"frequency_penalty": 0.6},
    {"presence_penalty": 0.5},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.6, "presence_penalty": 0.5, "repetition_penalty": 1.3},
)


@pytest.fixture(scope="module")
def loop(fault_lab):
    """Loops over three tokens, which lead so little that each penalty breaks the loop sooner or later.

    Random logits between -1 and 1 and three favourites of 1.4: presence takes .5 of it, repetition .32.
    """
    import torch

    law = torch.rand(300, 300, generator=torch.Generator().manual_seed(9)) * 2.2 - 1
    for token, favourite in {10: 11, 11: 12, 12: 10}.items():
        law[token, favourite] = 1.4
    return fault_lab.table(law)


@pytest.fixture(scope="module")
def asks(fault_lab):
    """The loop, then each penalty greedy and sampled; prompts differ, so that each has a text of its own."""
    laws = [{}, *PENALTIES, *(penalty | {"temperature": 0.7, "seed": 4} for penalty in PENALTIES)]
    return [
        fault_lab.ask([20 + index, 11], max_tokens=LENGTH, ignore_eos=True, **law)
        for index, law in enumerate(laws)
    ]


def test_h11_penalties_count_what_is_accepted_and_nothing_else(faults, same, loop, asks, drafter):
    """Their strength does not depend on acceptance: BASE's tokens under an oracle as under a liar."""
    known = drafter in ("oracle", "liar", "ngram", "spoiled", "ragged", "oracle-tree", "self-draft")
    # Of the penalties under a drafter of no use in a table: all together, greedy and sampled.
    _run(faults, same, loop, asks if known else [asks[0], asks[4], asks[8]], drafter, False)


@pytest.mark.parametrize("drafter", ["oracle", "ngram", "self-draft"])
def test_h11_penalties_one_step_late(faults, same, loop, asks, drafter):
    _run(faults, same, loop, asks, drafter, True)


def _run(faults, same, loop, asks, drafter, late):
    want = faults.base(asks, model=loop)
    plain, *penalised = (set(output.outputs[0].token_ids) for output in want)
    assert plain == {10, 11, 12}  # the loop, without a penalty
    assert all(ids != plain for ids in penalised)  # each penalty has an effect
    engine = faults.engine(
        faults.drafter(drafter, faults.texts(asks, model=loop), K), model=loop, async_scheduling=late
    )
    same(engine.generate(asks), want)
    if drafter == "oracle":
        assert engine.accepted == engine.drafted > 0
    if drafter == "liar":
        assert engine.drafted > engine.accepted == 0
