"""On a CPU: a step's cost by rows, and decoding beside transformers' own generate, in one process.

    python benchmarks/cpu.py --model MODEL.gguf [--dtypes float32,bfloat16,int8] [--tokens 64]

Prints two tables: the median milliseconds of a forward of 1 to 16 tokens after 512, and tokens per
second at batch 1, plain and with prompt lookup, ours and transformers' in turn on the same prompts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from specdecode import LLM, SamplingParams
from specdecode.bench.running import encode
from specdecode.bench.tasks import builtin_tasks
from specdecode.engine.plan import RowPlan, StepPlan
from specdecode.engine.request import RowDrafts

NGRAM = {"method": "ngram", "num_speculative_tokens": 5}
ROWS = (1, 2, 4, 6, 8, 16)


def options(dtype: str) -> dict[str, Any]:
    return {"quantization": "int8"} if dtype == "int8" else {"dtype": dtype}


def cost_curve(model: str, repeats: int = 15, **keywords: Any) -> dict[int, float]:
    """Milliseconds of a target forward, by tokens of one row at context 512."""
    with LLM(model, max_model_len=2048, device="cpu", **keywords) as llm:
        engine = llm.llm_engine
        params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
        engine.add_request("row", {"prompt_token_ids": [1000 + i for i in range(512)]}, params)
        for _ in range(3):
            engine.step()
        (request,) = engine.core.scheduler.running
        request.table.ensure(len(request.token_ids) + max(ROWS))

        def forward(rows: int) -> float:
            drafts = RowDrafts((5,) * (rows - 1), tuple(range(-1, rows - 2)))
            start = time.perf_counter()
            engine.core.runner.forward(StepPlan([RowPlan(request, request.computed, 1, drafts)]))
            return (time.perf_counter() - start) * 1e3

        forward(1)
        times = {rows: [] for rows in ROWS}
        for _ in range(repeats):
            for rows in ROWS:  # in turn, so that a slow spell of the machine hits all alike
                times[rows].append(forward(rows))
        return {rows: statistics.median(values) for rows, values in times.items()}


def beside_transformers(model: str, dtype: str, tokens: int) -> dict[str, float]:
    """Tokens per second of four ways to decode the same prompts, interleaved."""
    from specdecode import models

    files = models.resolve_model(model)
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(files.path, dtype=getattr(torch, dtype)).eval()
    common = {"dtype": dtype, "max_model_len": 2048, "device": "cpu", "enable_prefix_caching": False}
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    with LLM(model, **common) as plain, LLM(model, speculative_config=NGRAM, **common) as ngram:
        tokenizer = plain.get_tokenizer()
        prompts = [
            encode(tokenizer, prompt.text, chat=True)
            for task in builtin_tasks()
            for prompt in task.prompts[:1]
        ]

        def ours(llm: LLM, ids: list[int]) -> None:
            llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)

        @torch.inference_mode()
        def generate(ids: list[int], **extra: Any) -> None:
            theirs.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
                do_sample=False,
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                **extra,
            )

        ways = {
            "specdec": lambda ids: ours(plain, ids),
            "transformers": generate,
            "specdec ngram": lambda ids: ours(ngram, ids),
            "transformers prompt lookup": lambda ids: generate(ids, prompt_lookup_num_tokens=5),
        }
        seconds = dict.fromkeys(ways, 0.0)
        for way in ways.values():
            way(prompts[0])  # warm
        for ids in prompts:
            for name, way in ways.items():
                start = time.perf_counter()
                way(ids)
                seconds[name] += time.perf_counter() - start
    return {name: tokens * len(prompts) / value for name, value in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtypes", default="float32,bfloat16,int8")
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    dtypes = arguments.dtypes.split(",")
    console = Console(width=100)

    curve = Table("dtype", "exact", *map(str, ROWS), "8 / 1", title="ms a forward, by tokens of the row")
    for dtype in dtypes:
        for exact in (True,) if dtype == "int8" else (False, True):
            times = cost_curve(arguments.model, exact=exact, **options(dtype))
            ratio = f"{times[8] / times[1]:.2f}"
            curve.add_row(dtype, str(exact), *(f"{times[rows]:.1f}" for rows in ROWS), ratio)
    console.print(curve)

    rates = Table("dtype", "way", "tokens/s", "to transformers", title="batch 1, prompt included")
    for dtype in dtypes:
        if dtype != "int8":  # transformers has no twin of it
            found = beside_transformers(arguments.model, dtype, arguments.tokens)
            for name, rate in found.items():
                rates.add_row(dtype, name, f"{rate:.1f}", f"{rate / found['transformers']:.2f}x")
    console.print(rates)


if __name__ == "__main__":
    main()
