"""Requests of every kind, and an engine that answers them in ids: to test that a method changes no output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specdecode import LLM, SamplingParams


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
