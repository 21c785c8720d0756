"""Memory of engines that nobody holds any more."""

from __future__ import annotations

import gc

import torch


def cleanup_dist_env_and_memory() -> None:
    """Free what dropped engines held, now: scripts for vLLM call this behind ``del llm``.

    An engine's parts hold each other, so dropping its name alone frees nothing. The other ranks' processes
    end with it. ``LLM.shutdown`` frees an engine that is still held.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
