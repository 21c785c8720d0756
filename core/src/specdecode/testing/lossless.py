"""Requests of every kind, and an engine that answers them in ids: to test that a method changes no output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specdecode import LLM, SamplingParams

from .invariants import check_core

#: What is scarce -> arguments of an engine.
SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "chunked": {"max_num_batched_tokens": 12, "max_num_seqs": 4},
    "preempted": {"num_gpu_blocks_override": 30},
    "uncached": {"enable_prefix_caching": False},
}


def requests(count: int = 8) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of 3, 8, 13, ... random ids, and parameters greedy and seeded in turn."""
    rng = np.random.default_rng(0)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9, "top_p": 0.9, "seed": 5},
        {"temperature": 1.0, "seed": 6},
        {"temperature": 0, "presence_penalty": 0.6},
        {"temperature": 0.7, "top_k": 5, "seed": 2**40},
        {"temperature": 0, "min_tokens": 9},
        {"temperature": 0.8, "seed": 7, "repetition_penalty": 1.2},
        {"temperature": 1.2, "min_p": 0.02, "seed": -7},
    ]
    prompts = [rng.integers(3, 300, 3 + 5 * index).tolist() for index in range(count)]
    return prompts, [SamplingParams(max_tokens=14 + 2 * i, **kinds[i % 8]) for i in range(count)]


class Engine:
    """An engine in float32 on a CPU, with a small token budget, whose outputs are ids."""

    def __init__(
        self,
        target: str | Path,
        config: Mapping[str, Any] | None = None,
        order: str = "plain",
        **options: Any,
    ) -> None:
        """``order``: "plain", or "late" for a host that launches a step before it has read the last one."""
        defaults: dict[str, Any] = {
            "dtype": "float32",
            "device": "cpu",
            "block_size": 4,
            "num_gpu_blocks_override": 300,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "max_model_len": 96,
            "skip_tokenizer_init": True,
        }
        late = order == "late"
        self.llm = LLM(str(target), speculative_config=config, async_scheduling=late, **(defaults | options))

    def __call__(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[list[int]]:
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self.llm.generate(inputs, list(params), use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def metric(self, name: str) -> float:
        return {metric.name: getattr(metric, "value", 0) for metric in self.llm.get_metrics()}.get(name, 0)

    @property
    def accepted(self) -> float:
        return self.metric("vllm:spec_decode_num_accepted_tokens")


# -- what an engine with a method is held to; ``plain`` are the outputs of requests() without one ------------
def check_cold_and_warm(engine: Engine, plain: list[list[int]]) -> None:
    """All at once, again with what the prefix cache holds, and some alone."""
    prompts, params = requests()
    assert engine(prompts, params) == plain
    accepted = engine.accepted
    assert engine(prompts, params) == plain
    assert accepted > 0
    for index in (0, 2, 7):
        assert engine(prompts[index : index + 1], params[index : index + 1]) == plain[index : index + 1]
    check_core(engine.llm.llm_engine.core)


def check_schedule(
    target: str | Path, config: Mapping[str, Any], plain: list[list[int]], schedule: str, order: str
) -> None:
    """Under one of :data:`SCHEDULES`."""
    engine = Engine(target, config, order, **SCHEDULES[schedule])
    assert engine(*requests()) == plain
    assert engine.accepted > 0
    if schedule == "preempted":
        assert engine.metric("vllm:num_preemptions") > 0
    check_core(engine.llm.llm_engine.core)


def check_spell(
    target: str | Path, config: Mapping[str, Any], plain: list[list[int]], order: str = "plain"
) -> None:
    """With 3 requests and more nothing is drafted; what is left of them afterwards is."""
    engine = Engine(target, {**config, "disable_by_batch_size": 3}, order)
    assert engine(*requests()) == plain
    assert engine.metric("vllm:spec_decode_num_drafts") > 0
    check_core(engine.llm.llm_engine.core)


def check_told_laws(target: str | Path, config: Mapping[str, Any], plain: list[list[int]], rule: str) -> None:
    """Under a rule that weighs probabilities: greedy rows as ever, seeds repeat, and no law is dropped."""
    engine = Engine(target, {**config, "rejection_sample_method": rule}, max_num_batched_tokens=512)
    prompts, params = requests()
    outputs = engine(prompts, params)
    greedy = [index for index, own in enumerate(params) if own.temperature == 0]
    assert [outputs[index] for index in greedy] == [plain[index] for index in greedy]
    assert engine(prompts, params) == outputs
    assert engine.metric("specdecode:drafts_dropped_by_fault") == 0


def check_own_context(target: str | Path, config: Mapping[str, Any]) -> None:
    """A drafter of 16 positions: a prompt of 3 tokens is drafted for until it has them, one of 38 never."""
    prompts, params = requests()
    prompts, params = [prompts[0], prompts[7]], [SamplingParams(temperature=0, max_tokens=50)] * 2
    wanted = Engine(target)(prompts, params)
    engine = Engine(target, {**config, "max_model_len": 16})
    assert engine(prompts, params) == wanted
    assert 0 < engine.metric("vllm:spec_decode_num_drafts") <= 12
