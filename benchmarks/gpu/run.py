"""On one GPU, in one run: the card's limits, the 8B shape's decoding, and other programs beside it.

    python benchmarks/gpu/run.py --json result.json
    python benchmarks/gpu/run.py --sections hardware,plain,steps,ngram --budget 240 --json result.json

Each section prints its table as soon as it is measured and goes into the JSON file at once, so that a run
that is cut short loses only what it had not come to. Weights are random (the 8B shape needs none), requests
greedy with stop conditions off. A token's time is that of N tokens less that of one, so prompts do not count.

    hardware      copy and read bandwidth, matrix peak
    plain         decoding without speculation, and the floor its bytes set
    steps         the captured target step alone, 1 to 64 tokens a row: the cost of verification
    ngram         prompt lookup on text that loops
    synthetic     an EAGLE-shaped proposer, drafts accepted by rate
    heads         an EAGLE-3 chain of 3 and a draft model of 5, random weights, drafts accepted by rate
    adaptive      an EAGLE-3 chain, fixed lengths and those that core chooses, by acceptance and batch
    transformers  its generate, as it comes
    vllm          figures of vLLM's own run beside ours (--vllm FILE ...)
    smollm        SmolLM2-135M, real weights (--smollm FILE.gguf)
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import goals
import torch
from engines import DRAFT, EAGLE3, SHAPE, Engines, without_advice
from sections import LEAST, SECTIONS, Run
from specdecode.bench.report import environment_of


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sections", type=_names, default=list(SECTIONS), help="some of the above, in order")
    parser.add_argument("--batches", type=_numbers, default=[1, 8, 32, 128])
    parser.add_argument("--context", type=int, default=512, help="prompt tokens")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each; the median counts")
    parser.add_argument("--budget", type=float, default=570, help="seconds; what would not fit is left out")
    parser.add_argument("--json", type=Path, help="write everything measured here, section by section")
    parser.add_argument("--vllm", type=Path, nargs="*", default=[], help="JSON files of vLLM's runs")
    parser.add_argument("--smollm", type=Path, help="the SmolLM2 file")
    parser.add_argument("--trace-dir", type=Path, help="also profile a step of each kind, traces go here")
    parser.add_argument("--shape", type=Path, default=SHAPE, help="folder with a config.json")
    parser.add_argument(
        "--eagle3", type=Path, default=EAGLE3, help="folder with an EAGLE-3 head's config.json"
    )
    parser.add_argument("--draft", type=Path, default=DRAFT, help="folder with a draft model's config.json")
    parser.add_argument("--dtype", type=_dtype, default=torch.bfloat16)
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--option", type=_option, action="append", default=[], metavar="KEY=VALUE",
        help="further keyword of the engine; the value is JSON, or text",
    )  # fmt: skip
    return parser.parse_args()


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in SECTIONS]:
        raise argparse.ArgumentTypeError(f"no section {unknown[0]!r}; there are {', '.join(SECTIONS)}")
    return names


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _dtype(text: str) -> torch.dtype:
    return getattr(torch, text)


def _option(text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def main() -> None:
    options = _arguments()
    environment = environment_of(options.device, {})
    environment |= {"torch_cuda": torch.version.cuda, "host": platform.machine(), "shape": options.shape.name}
    engines = Engines(
        model=str(options.shape),
        keywords={
            "dtype": str(options.dtype).removeprefix("torch."),
            "device": options.device,
            "max_model_len": max(2048, options.context + options.new_tokens + 64),
            "max_num_batched_tokens": 8192,
            "gpu_memory_utilization": 0.85,
            **dict(options.option),
        },
    )
    run = Run(options, engines, environment)
    failed = []
    with without_advice():
        for name in options.sections:
            if run.left() < LEAST[name]:
                print(f"{name}: left out, {run.left():.0f} s of the budget are left", flush=True)
                continue
            try:
                SECTIONS[name](run)
            except Exception as error:  # the other sections still count
                failed.append(name)
                _tell(name, error)
                engines.close()
    engines.close()
    compared = goals.compare(run.sections)
    run.store("goals", f"Goals, {environment['device_name']}", goals.COLUMNS, compared)
    shown = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in engines.start_seconds.items())
    print(f"\nstart-up: {shown or 'none'}; {time.perf_counter() - run.started:.0f} s in all", flush=True)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def _tell(name: str, error: Exception) -> None:
    import traceback

    traceback.print_exception(error)
    print(f"{name}: failed, {type(error).__name__}: {str(error)[:300]}", flush=True)


if __name__ == "__main__":
    main()
