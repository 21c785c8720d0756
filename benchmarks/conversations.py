"""Methods side by side over conversations in which a model comes back to what it wrote.

    python benchmarks/conversations.py --model MODEL [--configs FILE] [--only NAME] [--json FILE]

Every turn of ``benchmarks/data/conversations.jsonl``, in order, goes to plain decoding and to each config,
one right after the other, batch 1, so that what else the machine does meets all of them. All engines keep
their prefix caches and what they remember of outputs, as a server would. Configs are as in ``heads.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from rich import box
from rich.console import Console
from rich.table import Table
from specdecode import SamplingParams
from specdecode.bench.counters import Counters
from specdecode.bench.datasets import read_dataset
from specdecode.bench.engines import engine
from specdecode.bench.report import environment_of
from specdecode.bench.running import PLAIN, encode

from heads import Config, add_options, configs_of


@attrs.define
class Total:
    """What a method did on the prompts of a task."""

    seconds: float = 0.0
    counters: Counters = attrs.Factory(Counters)
    different: int = 0  #: outputs that are not plain's

    def add(self, seconds: float, counters: Counters, *, same: bool) -> None:
        self.seconds += seconds
        self.counters += counters
        self.different += not same

    def __add__(self, other: Total) -> Total:
        return Total(
            self.seconds + other.seconds, self.counters + other.counters, self.different + other.different
        )


def measure(args: argparse.Namespace, configs: list[Config]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Environment, and of each method and task a total."""
    options = {
        "dtype": args.dtype, "device": args.device, "max_model_len": args.max_model_len,
        "max_batch_size": 1, "enable_prefix_caching": True,
    }  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    tasks = read_dataset(args.dataset, "messages", args.turns)
    with contextlib.ExitStack() as stack:
        sides = {PLAIN: stack.enter_context(engine(args.model, None, number=0, **options))}
        for config in configs:
            sides[config.name] = stack.enter_context(
                engine(args.model, config.speculative, number=1, **options)
            )
        tokenizer = sides[PLAIN].get_tokenizer()
        for llm in sides.values():
            llm.generate([{"prompt_token_ids": [1, 2, 3]}], params.clone(max_tokens=8), use_tqdm=False)
        totals = {name: {task.name: Total() for task in tasks} for name in sides}
        for task in tasks:
            for prompt in task.prompts:
                ids = encode(tokenizer, prompt)
                runs = {name: _run(llm, ids, params) for name, llm in sides.items()}
                expected = runs[PLAIN][0]
                for name, (written, seconds, counters) in runs.items():
                    totals[name][task.name].add(seconds, counters, same=written == expected)
                took = ", ".join(f"{name} {seconds:.2f}" for name, (_, seconds, _) in runs.items())
                print(f"{prompt.id}: {len(expected)} tokens; seconds: {took}", file=sys.stderr)
        environment = {
            **environment_of(sides[PLAIN].llm_engine.target.device, {}),
            "model": Path(args.model).name,
            "dtype": args.dtype,
            "num_prompts": sum(len(task.prompts) for task in tasks),
            "max_tokens": args.max_tokens,
        }
    return environment, totals


def _run(llm: Any, ids: list[int], params: SamplingParams) -> tuple[list[int], float, Counters]:
    before, start = Counters.read(llm.get_metrics()), time.perf_counter()
    (output,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    seconds = time.perf_counter() - start
    return list(output.outputs[0].token_ids), seconds, Counters.read(llm.get_metrics()) - before


def rows(totals: Mapping[str, Mapping[str, Total]]) -> list[dict[str, Any]]:
    """A row for each method and task, and one of all tasks."""
    found = []
    for name, own in totals.items():
        every = {**own, "all": sum(own.values(), Total())}
        for task, total in every.items():
            counted = total.counters
            plain = totals[PLAIN].get(task) or sum(totals[PLAIN].values(), Total())
            found.append(
                {
                    "method": name,
                    "task": task,
                    "tokens_per_s": counted.generated / total.seconds,
                    "speedup": plain.seconds / total.seconds,
                    "decode_speedup": (plain.counters.seconds_per_token or 0)
                    / (counted.seconds_per_token or 1),
                    "tokens_per_target_step": counted.tokens_per_target_step,
                    "drafting": counted.propose_seconds / total.seconds,
                    "different": total.different,
                }
            )
    return found


def table(found: list[dict[str, Any]]) -> Table:
    tasks = list(dict.fromkeys(row["task"] for row in found))
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    shown.add_column("method")
    for column in (*tasks, "tokens/step", "tokens/s", "token to token", "drafting", "identical"):
        shown.add_column(column, justify="right")
    for name in dict.fromkeys(row["method"] for row in found):
        of = {row["task"]: row for row in found if row["method"] == name}
        last = of["all"]
        shown.add_row(
            name,
            *(f"{of[task]['speedup']:.2f}x {of[task]['tokens_per_target_step']:.2f}" for task in tasks),
            f"{last['tokens_per_target_step']:.2f}",
            f"{last['tokens_per_s']:.1f}",
            f"{last['decode_speedup']:.2f}x",
            f"{100 * last['drafting']:.0f}%",
            "NO" if last["different"] else "yes",
        )
    return shown


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser, "conversations.jsonl", "conversation_configs.json", device="cpu", max_tokens=160)
    parser.add_argument("--turns", type=int, default=None, help="only so many")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    configs = [c for c in configs_of(args.configs, args.heads, args.only) if c.temperature == 0]
    environment, totals = measure(args, configs)
    found = rows(totals)
    if args.json is not None:
        args.json.write_text(
            json.dumps({"environment": environment, "rows": found}, indent=1) + "\n", "utf-8"
        )
    told = ("model", "dtype", "device_name", "num_prompts", "max_tokens")
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(", ".join(f"{key} {environment[key]}" for key in told), highlight=False)
    console.print(table(found))


if __name__ == "__main__":
    main()
