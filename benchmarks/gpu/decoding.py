"""End to end through ``LLM.generate``: plain, with ngram on looping text, with synthetic acceptance."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from engines import looping_prompts
from hardware import floor_ms
from specdecode import LLM
from steps import engine_step_ms
from tables import Column
from timing import Workload, against, decode_row, random_prompts

#: The rates of acceptance (of a draft behind an accepted one) and the lengths of the synthetic runs.
ACCEPTANCE = (0.6, 0.8)
LENGTHS = (3, 5)
#: Drafts a step of prompt lookup.
NGRAM_LENGTHS = (5, 3)
#: Rows beyond which a workload is repeated less often: its prompts take seconds.
MANY = 32

COLUMNS = (
    Column("method", "method"),
    Column("batch", "batch"),
    Column("ms_per_token", "ms/token", ".3f"),
    Column("tokens_per_s", "tokens/s", ".1f"),
    Column("ms_per_step", "ms/step", ".3f"),
    Column("tokens_per_step", "tokens/step", ".2f"),
    Column("acceptance_length", "accept", ".2f"),
    Column("speedup", "speedup", ".2f"),
    Column("efficiency", "efficiency", ".2f"),
    Column("step_ratio", "step/plain", ".2f"),
    Column("step_ms", "device step", ".3f"),
    Column("draft_ms", "of it drafting", ".3f"),
    Column("idle", "idle", ".1%"),
    Column("floor_ms", "floor", ".2f"),
    Column("of_floor", "of floor", ".2f"),
    Column("ms_to_first", "prompts, ms", ".0f"),
    Column("spread", "spread", ".1%"),
)


@attrs.frozen(kw_only=True)
class Size:
    """What is generated, and how often."""

    batches: tuple[int, ...]
    context: int
    new_tokens: int
    repeats: int


def rows(
    llm: LLM,
    method: str,
    size: Size,
    *,
    looping: bool = False,
    plain: Sequence[dict[str, Any]] = (),
    steps: Sequence[Mapping[str, Any]] = (),
    bytes_per_s: float | None = None,
) -> list[dict[str, Any]]:
    """A row a batch size.

    Args:
        looping: prompts that the looping weights go on with, instead of random ids.
        plain: rows of plain decoding, for speedup and efficiency.
        steps: the cost curve: what the target's step takes alone, so that the rest of the engine's own
            step is the proposer's.
        bytes_per_s: the card's rate, for the floor of a plain step.
    """
    make = functools.partial(_prompts, llm.llm_engine.target.vocab_size, size.context, looping)
    found = []
    for batch in size.batches:
        work = Workload(
            batch=batch,
            context=size.context,
            new_tokens=size.new_tokens,
            repeats=min(3, size.repeats) if batch > MANY else size.repeats,
            prompts=make,
        )
        row = {"method": method, **against(decode_row(llm, work), plain)}
        middle = size.context + size.new_tokens // 2
        row |= _device_time(llm, row, size, steps)
        if bytes_per_s and not llm.llm_engine.method:
            floor = floor_ms(llm.llm_engine.core.runner.model, batch, middle, bytes_per_s)
            row |= {"floor_ms": floor, "of_floor": row["ms_per_token"] / floor}
        found.append(row)
    return found


def _device_time(
    llm: LLM, row: Mapping[str, Any], size: Size, steps: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """What of a step is the device's, drafting apart; the rest of the loop's step is idle.

    The loop's step is the mean over its text's length, and is compared in the middle of it; ``steps`` are
    behind the prompt.
    """
    batch = row["batch"]
    own = engine_step_ms(llm, batch, size.context + size.new_tokens // 2)
    if own is None or not row["ms_per_step"]:
        return {}
    found = {"step_ms": own, "idle": 1 - own / row["ms_per_step"]}
    tokens = 1 + (llm.llm_engine.args.speculative_config or {}).get("num_speculative_tokens", 0)
    target = next((s["step_ms"] for s in steps if (s["batch"], s["tokens"]) == (batch, tokens)), None)
    if target is not None and tokens > 1:
        found["draft_ms"] = (engine_step_ms(llm, batch, size.context) or own) - target
    return found


def _prompts(vocab_size: int, context: int, looping: bool, batch: int, seed: int) -> Any:
    return (looping_prompts if looping else random_prompts)(batch, context, vocab_size, seed)


def ngram(length: int) -> dict[str, Any]:
    """Prompt lookup as vLLM's runs have it."""
    return {
        "method": "ngram",
        "num_speculative_tokens": length,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    }


def head(method: str, model: str, length: int, acceptance: float) -> dict[str, Any]:
    """A drafter of a shape alone, its drafts accepted by rate, as vLLM's runs have it.

    ``acceptance``: mean of tokens a step, the target's own counted.
    """
    return {
        "method": method,
        "model": model,
        "num_speculative_tokens": length,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": acceptance,
    }


def synthetic(rate: float, length: int) -> dict[str, Any]:
    """An EAGLE-shaped chain whose drafts are accepted by rate, whatever their tokens."""
    return {
        "method": "scripted-eagle",
        "num_speculative_tokens": length,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [rate ** (place + 1) for place in range(length)],
    }


def expected_tokens(rate: float, length: int) -> float:
    """Tokens a step under :func:`synthetic`: the target's own and the accepted drafts."""
    return 1 + sum(rate ** (place + 1) for place in range(length))
