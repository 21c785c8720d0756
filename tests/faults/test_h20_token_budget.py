"""H20: drafts are charged to a step's token budget, and everybody gets on."""

from __future__ import annotations

import pytest

BUDGET = 8


def watch(engine):
    """Steps as they are computed: rows of the target's forward, and running requests it passed over."""
    runner, scheduler = engine.core.runner, engine.core.scheduler
    model, sizes, passed_over = runner.model, [], []
    schedule = scheduler.schedule

    class Watched:
        def __call__(self, ids, *args):
            sizes.append(len(ids))
            return model(ids, *args)

        def __getattr__(self, name):
            return getattr(model, name)

    def watched(**options):
        plan = schedule(**options)
        rows = {row.request for row in plan.rows}
        passed_over.extend(r.id for r in scheduler.running if r not in rows and not r.at_limit)
        return plan

    runner.model, scheduler.schedule = Watched(), watched
    return sizes, passed_over


def check(faults, same, drafter, asks, k, **options):
    options = {"max_num_batched_tokens": BUDGET, "max_num_seqs": 4} | options
    engine = faults.engine(faults.drafter(drafter, faults.texts(asks, **options), k), **options)
    sizes, passed_over = watch(engine)
    same(engine.generate(asks), faults.base(asks, **options))
    assert max(sizes) <= options["max_num_batched_tokens"]
    assert not passed_over
    return engine, sizes


def test_h20_a_prompt_in_chunks_beside_three_that_decode(faults, same, drafter):
    asks = [
        faults.ask(faults.prompt(index)[:length], max_tokens=tokens, ignore_eos=True)
        for index, length, tokens in ((0, 3, 16), (1, 2, 16), (2, 3, 16), (7, 50, 4))
    ]
    engine, sizes = check(faults, same, drafter, asks, 5)
    assert max(sizes) == BUDGET  # what drafts leave goes to the prompt
    if drafter in ("oracle", "liar", "self-draft", "eagle", "medusa"):
        assert engine.drafted > 0


@pytest.mark.parametrize("budget", [1, 4, 6])
def test_h20_one_request_at_a_time(faults, same, drafter, budget):
    """Also where ``k`` drafts and a token are more than the budget: the drafts are trimmed."""
    asks = [faults.ask(faults.prompt(index)[:9], max_tokens=9, ignore_eos=True) for index in (2, 3)]
    engine, _ = check(faults, same, drafter, asks, 5, max_num_seqs=1, max_num_batched_tokens=budget)
    if budget == 1:
        assert engine.drafted == 0


def test_h20_as_many_requests_as_tokens(faults, same, drafter):
    """Everyone gets a token a step, and nobody a draft while all of them run."""
    asks = [faults.ask(faults.prompt(index)[:4], max_tokens=8, ignore_eos=True) for index in range(4)]
    check(faults, same, drafter, asks, 5, max_num_batched_tokens=4)
