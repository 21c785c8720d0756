"""Prompts of all sizes are met before the server listens, and leave nothing behind."""

from __future__ import annotations

import asyncio
import random

import pytest
from specdecode import SamplingParams
from specdecode.serve import warming
from specdecode.serve.warming import sizes, warm_up


def test_sizes_double_and_halve_the_way():
    assert list(sizes(100)) == [16, 24, 32, 48, 64, 96, 100]
    assert list(sizes(64)) == [16, 24, 32, 48, 64]
    assert list(sizes(5)) == [5] and list(sizes(0)) == []


@pytest.mark.parametrize("order", [False, True], ids=["plain", "late"])
def test_steps_of_all_sizes_are_computed_and_forgotten(make_llm, order):
    config = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": True}
    llm = make_llm(async_scheduling=order, speculative_config=config, max_num_batched_tokens=256)
    try:
        core, met = llm.engine.core, set()
        schedule = core.scheduler.schedule

        def watched(*args, **options):
            plan = schedule(*args, **options)
            met.update(row.new for row in plan.rows if row.prefill)
            return plan

        core.scheduler.schedule = watched
        assert asyncio.run(warm_up(llm)) > 0
        assert met >= set(sizes(256))
        pacer = core.drafting.policy.pacer
        assert not pacer._lengths and not pacer.acceptance._accepted.all.any()
        again: list[int | None] = []

        async def ask_again():
            dice = random.Random(0)  # as the warm-up's first two
            for length in list(sizes(256))[:2]:
                ids = [dice.randrange(llm.engine.target.vocab_size) for _ in range(length)]
                prompt = {"prompt_token_ids": ids, "cache_salt": warming._SALT}
                async for output in llm.generate(prompt, SamplingParams(max_tokens=1), f"again {length}"):
                    again.append(output.num_cached_tokens)

        asyncio.run(ask_again())
        assert again == [0, 0]
        counted = {metric.name: metric for metric in asyncio.run(llm.get_metrics())}
        assert counted["vllm:generation_tokens"].value >= 8 * len(list(sizes(256)))
    finally:
        llm.shutdown()


def test_a_model_of_few_tokens_is_warmed_up_as_far_as_they_go(make_llm):
    llm = make_llm(max_model_len=12)
    try:
        assert asyncio.run(warm_up(llm)) > 0
    finally:
        llm.shutdown()
