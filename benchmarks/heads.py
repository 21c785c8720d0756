"""Trained heads, draft models and lookups beside plain decoding, over prompts that nothing was trained on.

    python benchmarks/heads.py --model MODEL [--device cuda] [--dtype bfloat16] [--configs FILE] [--json FILE]

``--configs`` holds ``{temperature: {name: speculative_config}}``. A config with ``"head": NAME``, or one of
its ``proposers``, is that of the head of specdec-heads-smollm2 (``--heads DIR``: of a folder of such folders)
with the further keys; where there is no such head, it is passed over. All run in one process, each in turn
with plain on every prompt.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from rich import box
from rich.console import Console
from rich.table import Table
from specdecode import SamplingParams
from specdecode.bench.datasets import read_dataset
from specdecode.bench.engines import engine
from specdecode.bench.report import environment_of, overall, rows_of
from specdecode.bench.running import PLAIN, Comparison, Settings, compare, encode, fitting
from specdecode.bench.tasks import Task
from specdecode.contract import SpecdecodeError

DATA = Path(__file__).parent / "data"


@attrs.frozen
class Config:
    """One line of the table."""

    temperature: float
    name: str
    speculative: Mapping[str, Any]


def configs_of(file: Path, folder: Path | None, only: str) -> Iterator[Config]:
    """Those of ``file`` whose head is there; ``only``: whose name holds this."""
    for temperature, named in json.loads(file.read_text("utf-8")).items():
        for name, config in named.items():
            if only not in name:
                continue
            try:
                yield Config(float(temperature), name, resolved(config, folder))
            except NoSuchHead as error:
                print(f"{error}: {name} is passed over", file=sys.stderr)


class NoSuchHead(Exception):
    """A config is of a head that was not published."""


def resolved(config: Mapping[str, Any], folder: Path | None) -> dict[str, Any]:
    """``config`` with the config of the head that it names, its own keys first; so with its proposers."""
    own = dict(config)
    if "proposers" in own:
        own["proposers"] = [resolved(child, folder) for child in own["proposers"]]
    if (head := own.pop("head", None)) is None:
        return own
    base = head_config(head, folder)
    if base is None:
        raise NoSuchHead(f"no head {head}")
    return {**base, **own}


def head_config(name: str, folder: Path | None) -> dict[str, Any] | None:
    """The ``speculative_config`` that a head was published with; None: there is none of that name."""
    if folder is None:
        import specdec_heads_smollm2

        folder = Path(specdec_heads_smollm2.__file__).parent
    file = folder / name / "training.json"
    if not file.is_file():
        return None
    trained = json.loads(file.read_text("utf-8"))
    return {"method": trained["method"], **trained.get("speculative_config", {}), "model": str(file.parent)}


def measure(
    args: argparse.Namespace, configs: Sequence[Config]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Environment, and of each config a row for each task and one for all; into ``--json`` as they come."""
    options = {"dtype": args.dtype, "device": args.device, "max_model_len": args.max_model_len}
    options["max_batch_size"] = args.batch_size
    settings = Settings(batch_sizes=(args.batch_size,), repeats=args.repeats)
    found: list[dict[str, Any]] = []

    def keep() -> None:
        if args.json is not None:
            content = json.dumps({"environment": environment, "rows": found}, indent=1)
            args.json.write_text(content + "\n", "utf-8")

    with engine(args.model, None, number=0, **options) as plain:
        target = plain.llm_engine.target
        tasks = read_dataset(args.dataset, "jsonl")
        tasks = tuple(attrs.evolve(task, prompts=task.prompts[: args.each]) for task in tasks)
        longest = target.max_model_len - args.max_tokens
        tasks = fitting(tasks, plain.get_tokenizer(), longest, chat=True)
        environment = {
            **environment_of(target.device, {}),
            "model": Path(args.model).name,
            "dtype": target.dtype,
            "dataset": args.dataset.name,
            "num_prompts": sum(len(task.prompts) for task in tasks),
            "max_tokens": args.max_tokens,
            "batch_size": args.batch_size,
            "repeats": args.repeats,
            "seed": args.seed,
        }
        prompts = _warm_up_prompts(tasks, plain.get_tokenizer()) if target.device.startswith("cuda") else []
        _warm_up(plain, prompts)
        for config in configs:
            params = SamplingParams(
                temperature=config.temperature, seed=args.seed, max_tokens=args.max_tokens
            )
            try:
                with engine(args.model, config.speculative, number=1, **options) as speculative:
                    _warm_up(speculative, prompts)
                    comparisons = list(compare(plain, speculative, config.name, tasks, params, settings))
            except SpecdecodeError as error:
                print(f"{config.name}: {error}", file=sys.stderr)
                found.append({"name": config.name, "temperature": config.temperature, "error": str(error)})
                keep()
                continue
            found += rows(config, comparisons)
            keep()
            print(f"{config.name}, temperature {config.temperature:g}: {told(found[-1])}", file=sys.stderr)
    return environment, found


def _warm_up_prompts(tasks: Sequence[Task], tokenizer: Any) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": encode(tokenizer, prompt)} for task in tasks for prompt in task.prompts]


def _warm_up(llm: Any, prompts: Sequence[Mapping[str, Any]]) -> None:
    """Each prompt once: a kernel that is compiled for its length must not be while the clock runs."""
    params = SamplingParams(temperature=0.0, max_tokens=8)
    for prompt in prompts:
        llm.generate([prompt], params, use_tqdm=False)


def rows(config: Config, comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    """Of each task, then of all, with what the config says."""
    speculative = without_folders(config.speculative)
    own = {"name": config.name, "temperature": config.temperature, "speculative_config": speculative}
    last = overall(comparisons) or [comparisons[-1]]
    every = [*comparisons, *(total for total in last if total not in comparisons)]
    plain = {row.task: row.tokens_per_s for row in rows_of(every) if row.method == PLAIN}
    return [
        {**own, **attrs.asdict(row), "plain_tokens_per_s": plain[row.task]}
        for row in rows_of(every)
        if row.method != PLAIN
    ]


def without_folders(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with its checkpoints' names in the place of their paths."""
    own = dict(config)
    if "model" in own:
        own["model"] = Path(own["model"]).name
    if "proposers" in own:
        own["proposers"] = [without_folders(child) for child in own["proposers"]]
    return own


def told(row: Mapping[str, Any]) -> str:
    return f"{figure(row['acceptance_length'])} accepted a step, {row['speedup']:.2f}x"


def table(rows: Sequence[Mapping[str, Any]], temperature: float) -> Table:
    """A line for each config: acceptance length by task, and the rest over all of them."""
    chosen = [row for row in rows if row["temperature"] == temperature and "error" not in row]
    tasks = list(dict.fromkeys(row["task"] for row in chosen))
    shown = Table(
        title=f"temperature {temperature:g}", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1)
    )
    shown.add_column("config")
    heads = [f"accept {task}" for task in tasks]
    for column in (*heads, "tokens/step", "plain tok/s", "tok/s", "ratio"):
        shown.add_column(column, justify="right")
    shown.add_column("accepted at each place, %")
    shown.add_column("identical")
    for name in dict.fromkeys(row["name"] for row in chosen):
        of = {row["task"]: row for row in chosen if row["name"] == name}
        last = of[tasks[-1]]
        shown.add_row(
            name,
            *(figure(of[task]["acceptance_length"]) for task in tasks),
            figure(last["tokens_per_target_step"]),
            f"{last['plain_tokens_per_s']:.1f}",
            f"{last['tokens_per_s']:.1f}",
            f"{last['speedup']:.2f}x",
            " ".join(f"{100 * share:.0f}" for share in last["acceptance_per_position"] or ()) or "-",
            identity(last),
        )
    return shown


def identity(row: Mapping[str, Any]) -> str:
    """Whether outputs are plain's, where the rule of verification promises that."""
    if row["speculative_config"].get("rejection_sample_method", "invariant") != "invariant":
        return "not promised"
    return "yes" if row["identical"] else "NO"


def figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser, "held_out.jsonl", "head_configs.json", device="auto", max_tokens=128)
    parser.add_argument("--each", type=int, default=None, help="only so many prompts of each task")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def add_options(
    parser: argparse.ArgumentParser, dataset: str, configs: str, *, device: str, max_tokens: int
) -> None:
    """What is run, and where; names of files are of :data:`DATA`, all are defaults."""
    parser.add_argument("--model", required=True)
    parser.add_argument("--dataset", type=Path, default=DATA / dataset)
    parser.add_argument("--configs", type=Path, default=DATA / configs)
    parser.add_argument("--only", default="", help="configs whose name holds this")
    parser.add_argument("--heads", type=Path, default=None, help="a folder with a folder for each head")
    parser.add_argument("--device", default=device)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-tokens", type=int, default=max_tokens)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--json", type=Path, default=None, help="also write the figures to this file")


def main() -> None:
    args = arguments()
    configs = list(configs_of(args.configs, args.heads, args.only))
    if not configs:
        sys.exit("no config to measure: see --configs, --only and --heads")
    environment, found = measure(args, configs)
    console = Console(width=None if sys.stdout.isatty() else 200)
    told = ("model", "dtype", "device_name", "num_prompts", "max_tokens", "batch_size")
    console.print(", ".join(f"{key} {environment[key]}" for key in told), highlight=False)
    for temperature in dict.fromkeys(config.temperature for config in configs):
        console.print(table(found, temperature))
    if failed := [row["name"] for row in found if "error" in row]:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
