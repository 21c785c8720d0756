"""Asking the engine for much at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdecode import SamplingParams


def in_waves(
    llm: Any, prompts: Sequence[Any], params: Sequence[SamplingParams], size: int
) -> list[tuple[list[int], str]]:
    """Token ids of each prompt's output and why it ended, asked for ``size`` prompts at a time.

    An engine that is always full admits a request whenever one ends, so that nearly every step computes a
    prompt and none is replayed; here all prompts of a wave are computed first, and what follows runs as
    captured.
    """
    found = []
    for start in range(0, len(prompts), size):
        chosen = slice(start, start + size)
        for output in llm.generate(list(prompts[chosen]), list(params[chosen]), use_tqdm=False):
            found.append((list(output.outputs[0].token_ids), output.outputs[0].finish_reason))
    return found
