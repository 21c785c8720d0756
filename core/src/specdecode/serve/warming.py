"""Requests that nobody waits for, before the server listens: they meet what is slow the first time.

On a GPU kernels are compiled when a step of a new size first needs them, for a second or more, and prompts
come in all sizes.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Iterable, Iterator

from ..api.async_llm import AsyncLLM
from ..api.engine import LLMEngine
from ..api.params import RequestOutputKind, SamplingParams

logger = logging.getLogger("specdecode.serve")

#: Prefixes and memories of drafters are kept apart from everybody else's.
_SALT = "specdecode warm-up"
#: Tokens of each answer: some steps of decoding, drafts and all.
_ANSWER = 8
_SHORTEST = 16
#: Prompts that come at once, at the end.
_TOGETHER = 8

#: As most requests ask, and what has the host look at each step.
_USUAL = SamplingParams(
    temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, max_tokens=_ANSWER, ignore_eos=True, seed=0,
    detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY,
)  # fmt: skip
_SPECIAL = _USUAL.clone(logprobs=1, repetition_penalty=1.1)


def sizes(most: int) -> Iterator[int]:
    """Prompt lengths up to ``most`` tokens: powers of two and the middle between each two."""
    size = _SHORTEST
    while size < most:
        yield size
        if (middle := size + size // 2) < most:
            yield middle
        size *= 2
    if most > 0:
        yield most


async def warm_up(llm: AsyncLLM) -> float:
    """Answer prompts of all sizes, alone and beside others, then forget them; the seconds it took.

    They are in the counts of the metrics. What drafters and ``adaptive`` learned of them is dropped, or in a
    namespace of its own.

    Raises:
        EngineDeadError: the engine has stopped.
    """
    started = time.perf_counter()
    target, budget = llm.engine.target, llm.engine.args.token_budget
    most = min(target.max_model_len - _ANSWER - 1, budget)
    dice = random.Random(0)

    async def ask(name: str, length: int, params: SamplingParams) -> None:
        ids = [dice.randrange(target.vocab_size) for _ in range(length)]
        async for _ in llm.generate({"prompt_token_ids": ids, "cache_salt": _SALT}, params, name):
            pass

    async def all_of(lengths: Iterable[int]) -> None:
        await asyncio.gather(
            *(ask(f"warm-up-{place}", length, _USUAL) for place, length in enumerate(lengths))
        )

    found = list(sizes(most))
    together, special = found[:_TOGETHER], found[:1]
    for length in found:
        await all_of([length])
    await all_of(together)
    for length in special:
        await ask("warm-up", length, _SPECIAL)
    await llm.call(LLMEngine.forget_requests)
    seconds = time.perf_counter() - started
    count = len(found) + len(together) + len(special)
    logger.info("answered %d prompts to warm up, in %.1f s", count, seconds)
    return seconds
