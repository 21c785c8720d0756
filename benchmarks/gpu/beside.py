"""Other programs on the same card: transformers here, and vLLM's figures from its own run."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tables import Column
from timing import random_prompts

TRANSFORMERS = (
    Column("method", "method"),
    Column("batch", "batch"),
    Column("ms_per_token", "ms/token", ".2f"),
    Column("spread", "spread", ".1%"),
    Column("ours", "ours", ".3f"),
    Column("ratio", "times ours", ".2f"),
)
VLLM = (
    Column("run", "vLLM's run"),
    Column("batch", "batch"),
    Column("ms_per_token", "ms/token", ".3f"),
    Column("ms_per_step", "ms/step", ".3f"),
    Column("tokens_per_step", "tokens/step", ".2f"),
    Column("ours", "ours, ms/token", ".3f"),
    Column("our_step", "ms/step", ".3f"),
    Column("our_tokens", "tokens/step", ".2f"),
    Column("ratio", "tokens/s to vLLM", ".2f"),
    Column("step_ratio", "step to vLLM's", ".2f"),
)


def transformers_rows(
    shape: Path,
    batches: Sequence[int],
    context: int,
    plain: Sequence[dict[str, Any]],
    *,
    device: torch.device,
    dtype: torch.dtype,
    new_tokens: int = 32,
    repeats: int = 3,
) -> list[dict[str, Any]]:
    """transformers' ``generate`` as it comes, on random weights of the same shape."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(shape)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()

    @torch.inference_mode()
    def seconds(batch: int, count: int, seed: int) -> float:
        prompts = random_prompts(batch, context, config.vocab_size, seed)
        ids = torch.tensor([prompt["prompt_token_ids"] for prompt in prompts], device=device)
        options = {"min_new_tokens": count, "max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        start = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), **options).cpu()
        return time.perf_counter() - start

    found = []
    for batch in batches:
        seconds(batch, 4, 1)
        first = statistics.median(seconds(batch, 1, 2 + turn) for turn in range(repeats))
        whole = [seconds(batch, new_tokens, 2 + turn) for turn in range(repeats)]
        ms = (statistics.median(whole) - first) / (new_tokens - 1) * 1e3
        ours = next((row["ms_per_token"] for row in plain if row["batch"] == batch), None)
        found.append(
            {
                "method": "transformers generate",
                "batch": batch,
                "ms_per_token": ms,
                "spread": (max(whole) - min(whole)) / statistics.median(whole),
                "ours": ours,
                "ratio": ms / ours if ours else None,
            }
        )
    return found


def vllm_rows(
    files: Sequence[Path], plain: Sequence[dict[str, Any]], drafted: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The rows of ``bench_vllm.py``'s JSON files, ours of the same kind and batch beside them."""
    found = []
    for path in files:
        if not path.exists():
            found.append({"run": f"{path.name} is missing"})
            continue
        report = json.loads(path.read_text())
        spec = report["config"]
        name = "plain" if spec is None else f"{spec['method']} k={spec['num_speculative_tokens']}"
        ours = plain if spec is None else [row for row in drafted if row["method"] == name]
        for batch, theirs in report["rows"].items():
            mine = next((row for row in ours if row["batch"] == int(batch)), {})
            row = {
                "run": name,
                "batch": int(batch),
                **{key: theirs[key] for key in ("ms_per_token", "ms_per_step", "tokens_per_step")},
                "ours": mine.get("ms_per_token"),
                "our_step": mine.get("ms_per_step"),
                "our_tokens": mine.get("tokens_per_step"),
            }
            if mine:
                row["ratio"] = theirs["ms_per_token"] / mine["ms_per_token"]
                row["step_ratio"] = theirs["ms_per_step"] / mine["ms_per_step"]
            found.append(row | {"vllm": report["vllm"], "card": report["card"]})
    return found
