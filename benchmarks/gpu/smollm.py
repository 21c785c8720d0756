"""Real weights end to end: SmolLM2-135M on the built-in tasks, plain, with ngram, and beside transformers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from specdecode import SamplingParams
from specdecode.bench.engines import engine_pair
from specdecode.bench.report import overall, rows_of
from specdecode.bench.running import Settings, compare, encode
from specdecode.bench.tasks import builtin_tasks
from tables import Column

NGRAM = {"method": "ngram", "num_speculative_tokens": 5}
COLUMNS = (
    Column("task", "task"),
    Column("method", "method"),
    Column("batch_size", "batch"),
    Column("tokens_per_s", "tokens/s", ".1f"),
    Column("speedup", "speedup", ".2f"),
    Column("decode_speedup", "decode speedup", ".2f"),
    Column("acceptance_length", "accept", ".2f"),
    Column("tokens_per_target_step", "tokens/step", ".2f"),
    Column("efficiency", "efficiency", ".2f"),
    Column("identical", "identical"),
)


def measure(
    model: str, batches: Sequence[int], max_tokens: int, left: Callable[[], float], **options: Any
) -> list[dict[str, Any]]:
    """Rows of ``specdecode bench``, all tasks together for each batch size, and transformers' plain rate."""
    import attrs

    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    found: list[dict[str, Any]] = []
    with engine_pair(
        model, NGRAM, max_batch_size=max(batches), max_model_len=2048, dtype="bfloat16", **options
    ) as (plain, speculative):
        tokenizer = plain.get_tokenizer()
        for batch in batches:
            if left() < 20:
                break
            settings = Settings(batch_sizes=(batch,))
            results = list(compare(plain, speculative, "ngram", builtin_tasks(), params, settings))
            found += [attrs.asdict(row) for row in rows_of([*results, *overall(results)])]
    if left() > 60:
        found += _transformers(model, tokenizer, max_tokens)
    return found


def _transformers(model: str, tokenizer: Any, max_tokens: int) -> list[dict[str, Any]]:
    """Its ``generate`` on the first prompt of each task, batch 1."""
    from specdecode import models
    from transformers import AutoModelForCausalLM

    path = models.resolve_model(model).path
    device = "cuda" if torch.cuda.is_available() else "cpu"
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval().to(device)
    prompts = [encode(tokenizer, task.prompts[0], chat=True) for task in builtin_tasks()]
    count = {"min_new_tokens": max_tokens, "max_new_tokens": max_tokens}

    @torch.inference_mode()
    def run(ids: list[int]) -> None:
        given = torch.tensor([ids], device=device)
        mask = torch.ones_like(given)
        reference.generate(given, attention_mask=mask, do_sample=False, pad_token_id=0, **count).cpu()

    run(prompts[0])
    start = time.perf_counter()
    for ids in prompts:
        run(ids)
    seconds = time.perf_counter() - start
    return [
        {
            "task": "first of each",
            "method": "transformers",
            "batch_size": 1,
            "tokens_per_s": max_tokens * len(prompts) / seconds,
        }
    ]
