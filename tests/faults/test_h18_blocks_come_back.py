"""H18: slots for drafts are given back, however requests end."""

from __future__ import annotations

import itertools

import pytest

REQUESTS, AT_A_TIME = 50, 10

#: Always wrong, always right, now and then; and two whose drafts have KV of their own.
DRAFTERS = ("liar", "oracle", "ragged", "oracle-tree", "ngram", "self-draft", "eagle3-grown-tree")


def asks_of(faults):
    """Requests that end by length, stop token or stop string; half of them are aborted on the way."""
    asks = []
    for number in range(REQUESTS):
        prompt = [*faults.prompt(1 + number % 4)[: 3 + number % 11], 40 + number]
        ends = ({}, {"stop_token_ids": list(range(3, 80))}, {"stop": [chr(c) for c in range(33, 90)]})
        sampled = {"temperature": 0.9, "seed": number}
        asks.append(faults.ask(prompt, max_tokens=4 + number % 5, **sampled, **ends[number % 3]))
    return asks


@pytest.mark.parametrize(("size", "caching"), [(1, True), (4, True), (4, False), (16, True)])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_h18_idle_after_every_batch(faults, drafter, size, caching):
    asks = asks_of(faults)
    engine = faults.engine(
        faults.drafter(drafter, faults.texts(asks), 4),
        block_size=size,
        num_gpu_blocks_override=800 // size,
        max_model_len=64,
        enable_prefix_caching=caching,
    )
    llm, pool, reasons = engine.llm.llm_engine, engine.core.scheduler.pool, set()
    for start in range(0, REQUESTS, AT_A_TIME):
        for number in range(start, start + AT_A_TIME):
            llm.add_request(str(number), {"prompt_token_ids": asks[number].prompt}, asks[number].params)
        for step in itertools.count():
            if not llm.has_unfinished_requests():
                break
            reasons |= {out.outputs[0].finish_reason for out in llm.step() if out.finished}
            if step < 5:
                llm.abort_request(str(start + 2 * step + 1))
                engine.core.scheduler.check()
        engine.assert_idle()
    assert reasons == {"length", "stop"}
    assert {event.kind for event in engine.recording.events} >= {"add", "commit", "finish"}
    assert bool(pool.published) == caching
    assert llm.reset_prefix_cache()
    engine.assert_idle()
    assert not pool.published and pool.num_free == pool.num_blocks
    assert engine.drafted > 0
