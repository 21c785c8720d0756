"""Clocks: device events for device work, a wall clock for calls of the engine; medians of many."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from specdecode import LLM, SamplingParams
from specdecode.bench.counters import Counters

Prompts = list[dict[str, list[int]]]


def device_ms(
    work: Callable[[], Any],
    *,
    before: Callable[[], Any] = lambda: None,
    repeats: int = 25,
    warmup: int = 3,
) -> float:
    """Median milliseconds of ``work`` on the GPU; without one, of the call itself.

    ``before`` is called ahead of each, and not timed.
    """
    for _ in range(warmup):
        before()
        work()
    if not torch.cuda.is_available():
        return statistics.median(_wall_ms(work, before) for _ in range(repeats))
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in marks:
        before()
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in marks)


def _wall_ms(work: Callable[[], Any], before: Callable[[], Any]) -> float:
    before()
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e3


def captured(work: Callable[[], Any]) -> Callable[[], Any]:
    """A CUDA graph's replay of ``work``; without a GPU ``work`` itself."""
    if not torch.cuda.is_available():
        return work
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # compiles, and fills caches that capture may not
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def random_prompts(batch: int, context: int, vocab_size: int, seed: int) -> Prompts:
    """``batch`` prompts of ``context`` random ids: other ones for each seed."""
    rng = np.random.default_rng(seed)
    return [{"prompt_token_ids": rng.integers(10, vocab_size - 10, context).tolist()} for _ in range(batch)]


@attrs.frozen(kw_only=True)
class Workload:
    """Greedy requests of one size, stop conditions off."""

    batch: int
    context: int
    new_tokens: int
    repeats: int
    prompts: Callable[[int, int], Prompts]  #: of batch and seed


def generate_seconds(llm: LLM, prompts: Prompts, new_tokens: int) -> float:
    """Seconds of one ``LLM.generate``."""
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    if any(len(output.outputs[0].token_ids) != new_tokens for output in outputs):
        raise RuntimeError(f"an output does not have {new_tokens} tokens: {outputs[0].outputs[0]}")
    return seconds


def decode_row(llm: LLM, work: Workload) -> dict[str, Any]:
    """What a token and a step of ``work`` cost: the time of all tokens less that of the first one's run.

    Returns:
        ms_per_token, tokens_per_s, ms_per_step (of the engine), tokens_per_step (of a request's decode
        step, drafted or not), acceptance_length, drafts_per_step, spread ((max - min) / median), the raw
        seconds, ``ms_to_first``, the median time of the first token's run, and ``host_waits``, how often in
    a timed run the device waited for the host, by reason.
    """
    generate_seconds(llm, work.prompts(work.batch, 1), work.new_tokens)
    generate_seconds(llm, work.prompts(work.batch, 1), 1)
    first, first_counts = _runs(llm, work, 1)
    waits = _host_waits(llm)
    whole, whole_counts = _runs(llm, work, work.new_tokens)
    waits = {
        reason: (count - waits.get(reason, 0)) / work.repeats for reason, count in _host_waits(llm).items()
    }
    tokens = work.new_tokens - 1
    seconds = statistics.median(whole) - statistics.median(first)
    steps = (whole_counts.steps - first_counts.steps) / work.repeats
    return {
        "batch": work.batch,
        "ms_per_token": seconds / tokens * 1e3,
        "tokens_per_s": work.batch * tokens / seconds,
        "ms_per_step": seconds / steps * 1e3 if steps > 0 else None,
        "tokens_per_step": whole_counts.tokens_per_target_step,
        "acceptance_length": whole_counts.acceptance_length,
        "drafts_per_step": whole_counts.drafts_per_target_step,
        "spread": (max(whole) - min(whole)) / statistics.median(whole),
        "ms_to_first": statistics.median(first) * 1e3,
        "host_waits": {reason: count for reason, count in waits.items() if count},
        "first_seconds": first,
        "whole_seconds": whole,
    }


def _runs(llm: LLM, work: Workload, new_tokens: int) -> tuple[list[float], Counters]:
    before = Counters.read(llm.get_metrics())
    seconds = [
        generate_seconds(llm, work.prompts(work.batch, 2 + turn), new_tokens) for turn in range(work.repeats)
    ]
    return seconds, Counters.read(llm.get_metrics()) - before


def _host_waits(llm: LLM) -> dict[str, float]:
    metrics = llm.get_metrics()
    return {m.labels["reason"]: m.value for m in metrics if m.name == "specdecode:host_waits"}


def against(row: dict[str, Any], plain: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """``row`` with its speedup over the plain row of the same batch, and the efficiency of that."""
    beside = next((other for other in plain if other["batch"] == row["batch"]), None)
    if beside is None:
        return row
    speedup = beside["ms_per_token"] / row["ms_per_token"]
    tokens = row["tokens_per_step"]
    return {
        **row,
        "speedup": speedup,
        "efficiency": speedup / tokens if tokens else None,
        "step_ratio": row["ms_per_step"] / beside["ms_per_token"] if row["ms_per_step"] else None,
    }
