"""Draft lengths: fixed ones, and those that core chooses (``adaptive``), at given acceptances and batches.

One engine runs them all. Its steps are captured for each width; a fixed length is its step of that width,
held, and drafts are accepted by a rate that is changed between runs. Before each adaptive run it forgets what
it learned of drafts and costs, so that what learning takes is part of the figure.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from specdecode import LLM, SamplingParams
from tables import Column
from timing import random_prompts

#: Rates at which a draft behind an accepted one is accepted.
ACCEPTANCE = (0.3, 0.6, 0.8)
#: Fixed lengths; the last is the most that is drafted.
LENGTHS = (1, 2, 3, 5, 7)
#: New tokens of a request, by batch: some hundred steps each.
NEW_TOKENS = {1: 512, 8: 384, 32: 256}
MANY_NEW_TOKENS = 192
CONTEXT = 128
#: Goals, to plain decoding and to the best fixed length.
LEAST_TO_PLAIN, LEAST_TO_BEST = 0.97, 0.95

COLUMNS = (
    Column("batch", "batch"),
    Column("acceptance", "acceptance", ".1f"),
    Column("tokens_per_s", "plain, tok/s", ".0f"),
    *(Column(f"k={length}", f"k={length}", ".2f") for length in LENGTHS),
    Column("adaptive", "adaptive", ".3f"),
    Column("best", "best"),
    Column("to_best", "to best", ".3f"),
    Column("mean_length", "mean length", ".2f"),
    Column("explored", "exploring", ".1%"),
    Column("rested", "resting", ".1%"),
    Column("reached", "reached"),
)


def config(method: str, model: str) -> dict[str, Any]:
    """The engine's drafter: a chain of the most drafts, of which core chooses how many are made."""
    length = LENGTHS[-1]
    return {
        "method": method,
        "model": model,
        "num_speculative_tokens": length,
        "adaptive": True,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [ACCEPTANCE[0] ** (place + 1) for place in range(length)],
    }


def plain_speed(llm: LLM, batch: int, most: int) -> float:
    """Tokens a second of decoding without speculation, ``most`` new tokens a request at most."""
    _tokens_per_s(llm, batch, 16)
    return _tokens_per_s(llm, batch, most)


def rows(llm: LLM, batch: int, most: int, plain: float, left: Callable[[], float]) -> list[dict[str, Any]]:
    """A row an acceptance: speeds over ``plain``, tokens a second; as long as seconds are ``left``."""
    core = llm.llm_engine.core
    pacer, rates = core.drafting.policy.pacer, core.steady.rates
    widths, found = core.steady.widths(batch), []
    _tokens_per_s(llm, batch, 16)
    for acceptance in ACCEPTANCE:
        if left() < 10:
            break
        rates.fill_(acceptance)
        fixed = {"plain": 1.0}
        for length in LENGTHS:
            if length in widths:
                pacer.held = length
                fixed[f"k={length}"] = _tokens_per_s(llm, batch, most) / plain
        pacer.held = None
        pacer.forget_all()
        size, before = core.steady.bucket(batch), _chosen(llm)
        expected_ms = {width: 1e3 * pacer.whole.seconds(size, 1 + width) for width in widths}
        speed = _tokens_per_s(llm, batch, most) / plain
        lengths, reasons = (
            {key: count - then[key] for key, count in now.items()}
            for then, now in zip(before, _chosen(llm), strict=True)
        )
        best = max(fixed, key=lambda name: fixed[name])
        good = speed >= LEAST_TO_PLAIN and speed / fixed[best] >= LEAST_TO_BEST
        found.append(
            {"batch": batch, "acceptance": acceptance, "tokens_per_s": plain}
            | fixed
            | {
                "adaptive": speed,
                "best": best,
                "to_best": speed / fixed[best],
                "mean_length": sum(k * count for k, count in lengths.items()) / max(1, sum(lengths.values())),
                "explored": reasons["explore"] / max(1, sum(reasons.values())),
                "rested": reasons["rest"] / max(1, sum(reasons.values())),
                "lengths": lengths,
                "expected_ms": expected_ms,
                "learned_ms": {width: 1e3 * pacer.whole.seconds(size, 1 + width) for width in widths},
                "reasons": reasons,
                "reached": "yes" if good else "NO",
            }
        )
    return found


def _chosen(llm: LLM) -> tuple[dict[Any, float], dict[Any, float]]:
    metrics = llm.get_metrics()
    lengths = next(metric.value for metric in metrics if metric.name == "specdecode:draft_lengths")
    reasons = [metric for metric in metrics if metric.name == "specdecode:draft_length_reasons"]
    return dict(enumerate(lengths)), {metric.labels["reason"]: metric.value for metric in reasons}


def _tokens_per_s(llm: LLM, batch: int, most: int) -> float:
    """Of decoding alone: from when all requests have their first token until one has its last."""
    engine, core = llm.llm_engine, llm.llm_engine.core
    new_tokens = min(most, NEW_TOKENS.get(batch, MANY_NEW_TOKENS))
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    for index, prompt in enumerate(random_prompts(batch, CONTEXT, engine.target.vocab_size, 1)):
        engine.add_request(str(index), prompt, params.clone(seed=index))
    scheduler, counted = core.scheduler, core.metrics.generation_tokens
    while scheduler.waiting or any(request.num_output < 1 for request in scheduler.running):
        engine.step()
    tokens, started = counted.total, time.perf_counter()
    while not any(output.finished for output in engine.step()):
        pass
    rate = (counted.total - tokens) / (time.perf_counter() - started)
    while engine.has_unfinished_requests():
        engine.step()
    return rate
