"""H17: a request larger than the KV pool stalls nobody; room for drafts is reckoned.

The pool has 12 blocks of 4. Steps are counted in place of a watchdog's seconds: a stall is a test
that runs out of them.
"""

from __future__ import annotations

import pytest

POOL = {"num_gpu_blocks_override": 12, "block_size": 4, "max_model_len": 48, "max_num_seqs": 8}
MOST_STEPS = 400


def drain(engine):
    """Finished outputs by request id, in a bounded number of steps."""
    finished = {}
    for _ in range(MOST_STEPS):
        if not engine.llm.llm_engine.has_unfinished_requests():
            return finished
        finished |= {out.request_id: out for out in engine.llm.llm_engine.step() if out.finished}
    raise AssertionError(f"not done after {MOST_STEPS} steps: {sorted(finished)} are")


def add(engine, name, ask):
    engine.llm.llm_engine.add_request(name, {"prompt_token_ids": ask.prompt}, ask.params)


def test_h17_a_request_that_wants_more_than_the_pool(faults, same, drafter):
    """A prompt of 13 blocks is refused before it is queued; an output that would need them ends by length."""
    asks = [
        faults.ask(faults.prompt(index)[:length], max_tokens=tokens, ignore_eos=True)
        for index, length, tokens in ((2, 10, 8), (7, 45, 100), (3, 12, 100), (4, 12, 8))
    ]
    want = faults.base(asks, **POOL)
    engine = faults.engine(faults.drafter(drafter, faults.texts(asks, **POOL), 6), **POOL)
    for place, ask in enumerate(asks):
        add(engine, str(place), ask)
        if place == 1:
            with pytest.raises(ValueError, match=r"49 tokens.*max_model_len=48"):
                add(engine, "too long", faults.ask(faults.prompt(7)[:49]))
    finished = drain(engine)
    same([finished[str(place)] for place in range(len(asks))], want)
    assert len(finished) == len(asks)
    assert [len(o.prompt_token_ids) + len(o.outputs[0].token_ids) for o in want] == [18, 48, 48, 20]


def test_h17_a_pool_smaller_than_the_context(faults, drafter):
    """Asked for, it is refused with the remedy; else the context is lowered to what can be served."""
    config = faults.drafter(drafter, [], 6)
    with pytest.raises(ValueError, match=r"max_model_len=52.*num_gpu_blocks_override"):
        faults.engine(config, **(POOL | {"max_model_len": 52}))
    engine = faults.engine(config, **(POOL | {"max_model_len": None}))
    assert engine.llm.llm_engine.target.max_model_len == 48


def test_h17_a_request_that_fills_the_pool(faults, same, drafter):
    """Alone: it is never in its own way, and its drafts are shortened at the end."""
    ask = faults.ask(faults.prompt(4)[:20], max_tokens=28, ignore_eos=True)
    engine = faults.engine(faults.drafter(drafter, faults.texts([ask], **POOL), 6), **POOL)
    reach, forward = [], engine.core.runner.forward
    engine.core.runner.forward = lambda plan: (
        reach.extend(r.start + r.num_tokens for r in plan.rows),
        forward(plan),
    )[1]
    add(engine, "full", ask)
    same([drain(engine)["full"]], faults.base([ask], **POOL))
    assert engine.metric("vllm:num_preemptions") == 0
    assert max(reach) <= 48 and engine.recording.drafts[-1].room == 0  # slots, those of drafts included


@pytest.mark.parametrize("late", [False, pytest.param(True, marks=pytest.mark.sweep)])
def test_h17_six_requests_that_preempt_each_other(faults, same, drafter, late):
    asks = [
        faults.ask(faults.prompt(index)[: 6 + index], max_tokens=10, ignore_eos=True, **sampled)
        for index, sampled in enumerate([{}, {"temperature": 0.8, "seed": 3}] * 3)
    ]
    options = POOL | {"async_scheduling": late}
    engine = faults.engine(faults.drafter(drafter, faults.texts(asks, **POOL), 6), **options)
    for place, ask in enumerate(asks):
        add(engine, str(place), ask)
    finished = drain(engine)
    same([finished[str(place)] for place in range(6)], faults.base(asks, **POOL))
    assert engine.metric("vllm:num_preemptions") > 0
