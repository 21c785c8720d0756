"""``specdecode bench``: plain and speculative decoding side by side on real prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from specdecode.contract import ConfigError

from . import arguments, bench_options, demo
from .arguments import engine_options, speculation_of
from .bench_serve import bench_serve
from .progress import progress_bar

if TYPE_CHECKING:
    from specdecode.bench.profiling import StepProfile
    from specdecode.bench.running import Comparison, Settings
    from specdecode.bench.tasks import Task

#: What is measured when no --spec-... option says otherwise.
DEFAULT_SPECULATION: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 5}


class Bench(TyperGroup):
    """``bench OPTIONS`` is ``bench run OPTIONS``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in self.commands:
            args = ["run", *args]
        return super().parse_args(ctx, args)


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    commands = typer.Typer(
        cls=Bench, help="Compare plain and speculative decoding; or put a server under load."
    )
    commands.command("run")(bench)
    commands.command("serve")(bench_serve)
    app.add_typer(commands, name="bench")
    app.command("demo")(demo.demo)


def bench(
    model: arguments.Model,
    prompts: bench_options.Prompts = None,
    dataset: bench_options.Dataset = None,
    dataset_format: bench_options.DatasetFormat = None,
    num_prompts: bench_options.NumPrompts = None,
    task: bench_options.Task = None,
    batch_size: bench_options.BatchSize = "1",
    max_tokens: bench_options.MaxTokens = 128,
    ignore_eos: bench_options.IgnoreEos = False,
    temperature: bench_options.Temperature = 0.0,
    top_p: bench_options.TopP = 1.0,
    seed: bench_options.Seed = 0,
    repeats: bench_options.Repeats = 1,
    chat: bench_options.Chat = True,
    as_json: arguments.AsJson = False,
    output: bench_options.Output = None,
    profile: bench_options.Profile = False,
    trace_dir: bench_options.TraceDir = None,
    spec_config: arguments.SpecConfig = None,
    spec_method: arguments.SpecMethod = None,
    spec_model: arguments.SpecModel = None,
    spec_tokens: arguments.SpecTokens = None,
    spec_option: arguments.SpecOption = None,
    adaptive: bench_options.Adaptive = False,
    dtype: arguments.Dtype = "auto",
    quantization: arguments.Quantization = None,
    device: arguments.Device = "auto",
    tensor_parallel_size: arguments.TensorParallelSize = 1,
    max_model_len: arguments.MaxModelLen = None,
    no_plugin: arguments.NoPlugin = None,
) -> None:
    """Run prompts plain and with speculation in one process, and compare tokens and speed.

    Without --spec-... options prompt lookup with 5 tokens is measured. Ends with status 1 if any
    output differs from the plain one. ``specdecode bench serve`` puts a server under load instead.
    """
    given = speculation_of(spec_config, spec_method, spec_model, spec_tokens, spec_option)
    speculation = {**(given or DEFAULT_SPECULATION), **({"adaptive": True} if adaptive else {})}
    sizes = _batch_sizes(batch_size)
    tasks = tasks_of(prompts, dataset, dataset_format, num_prompts, task, most=80)
    check_folder(output)
    if trace_dir is not None and not profile:
        raise ConfigError(f"--trace-dir {trace_dir} is where --profile writes traces: add --profile")
    traces = trace_dir or Path("specdec-traces")
    if profile:
        _make(traces)

    from specdecode import SamplingParams
    from specdecode.bench.engines import engine_pair
    from specdecode.bench.report import advice_on, environment_of, rows_of
    from specdecode.bench.report import as_json as report
    from specdecode.bench.running import Settings, compare, count_runs, fitting

    params = SamplingParams(
        temperature=temperature, top_p=top_p, seed=seed, max_tokens=max_tokens, ignore_eos=ignore_eos
    )
    settings = Settings(batch_sizes=sizes, repeats=repeats, chat=chat)
    options = engine_options(dtype, quantization, device, max_model_len, no_plugin, tensor_parallel_size)
    with engine_pair(model, speculation, max_batch_size=max(sizes), **options) as (plain, speculative):
        target = plain.llm_engine.target
        if dataset is not None:
            longest = target.max_model_len - max_tokens
            tasks = fitting(tasks, plain.get_tokenizer(), longest, chat=chat)
        with progress_bar("Running", count_runs(tasks, settings)) as advance:
            method = speculative.llm_engine.method
            found = compare(plain, speculative, method, tasks, params, settings, advance=advance)
            comparisons = list(found)
        profiles = _profiles(plain, speculative, tasks[0], params, settings, traces) if profile else None
        asked = speculative.llm_engine.args.speculative_config.method or method
        provider = speculative.llm_engine.plugins.resolve(asked)
    environment = {
        **environment_of(target.device, {provider.dist: provider.version}),
        "model": model,
        "dtype": target.dtype,
        "quantization": quantization,
        "speculative_config": speculation,
        "prompts": str(dataset or prompts or "built-in"),
        "dataset_format": dataset_format or "jsonl" if dataset and dataset.exists() else None,
        "num_prompts": sum(len(task.prompts) for task in tasks),
        "max_tokens": max_tokens,
        "ignore_eos": ignore_eos,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "repeats": repeats,
    }
    advice = advice_on(comparisons)
    result = json.dumps(report(environment, rows_of(comparisons), advice, profiles))
    if output is not None:
        write(output, result)
    if as_json:
        typer.echo(result)
    else:
        _print(comparisons, model, environment, advice, profiles)
    _end(comparisons)


def _batch_sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise ConfigError(
            f"--batch-size must be positive integers with commas between, such as 1,8; got {text!r}"
        )
    return sizes


def tasks_of(
    prompts: Path | None,
    dataset: Path | None,
    format: str | None,
    limit: int | None,
    names: Sequence[str] | None,
    *,
    most: int,
) -> tuple[Task, ...]:
    """What ``--prompts``, ``--dataset`` and ``--task`` name.

    Args:
        format, limit: ``--dataset-format`` and ``--num-prompts``, which are for files of ``--dataset`` only.
        most: prompts of such a file if ``limit`` is None.

    Raises:
        ConfigError: they contradict each other, or cannot be read.
    """
    from specdecode.bench.datasets import read_dataset
    from specdecode.bench.tasks import COLLECTIONS, builtin_tasks, load_tasks, pick

    if prompts is not None and dataset is not None:
        raise ConfigError("--prompts and --dataset are both given: keep one")
    builtin = dataset is None or (str(dataset) in COLLECTIONS and not dataset.exists())
    options = {"--dataset-format": format, "--num-prompts": limit} if builtin else {}
    if useless := [name for name, value in options.items() if value is not None]:
        raise ConfigError(
            f"{' and '.join(useless)} would have no effect: only a file of --dataset is read so; add one"
        )
    if dataset is not None:
        if builtin:
            return pick(builtin_tasks(str(dataset)), names)
        return pick(read_dataset(dataset, format or "jsonl", limit or most), names)
    return pick(load_tasks(prompts) if prompts else builtin_tasks(), names)


def check_folder(output: Path | None) -> None:
    """Raise before the work where ``--output`` could not be written after it."""
    if output is not None and not output.parent.is_dir():
        raise ConfigError(
            f"--output: there is no folder {output.parent} to write {output.name} in; make it first"
        )


def write(path: Path, text: str) -> None:
    """Write ``--output``.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output: cannot write {path}: {error.strerror}") from error


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--trace-dir: cannot make {folder}: {error.strerror}") from error


def _profiles(
    plain: Any, speculative: Any, task: Task, params: Any, settings: Settings, folder: Path
) -> list[StepProfile]:
    """One a batch size and engine, on the first prompts of ``task``."""
    from specdecode.bench.profiling import profile
    from specdecode.bench.running import PLAIN, first_batch

    tokenizer = plain.get_tokenizer()
    found = []
    for size in settings.batch_sizes:
        prompts = first_batch(task, size, tokenizer, chat=settings.chat)
        for method, llm in ((PLAIN, plain), (speculative.llm_engine.method, speculative)):
            found.append(profile(llm, method, prompts, params, folder))
    return found


def _print(
    comparisons: Sequence[Comparison],
    model: str,
    environment: dict[str, Any],
    advice: str | None,
    profiles: Sequence[StepProfile] | None,
) -> None:
    from rich.console import Console

    from specdecode.bench.profiling import profile_table
    from specdecode.bench.report import cost_table_of, table_of

    console = Console()
    stored = environment["quantization"] or environment["dtype"]
    title = f"{Path(model).name}, {stored}, {environment['device_name']}"
    console.print(table_of(comparisons, title))
    console.print()
    console.print(cost_table_of(comparisons, "What drafting cost and where the time went"))
    if profiles:
        console.print()
        console.print(profile_table(profiles, "Where a decode step's time went, ms and share"))
        console.print(f"traces, for Perfetto: {Path(profiles[0].trace).parent}", soft_wrap=True)
    if advice is not None:
        console.print(f"\nadvice: {advice}", highlight=False, soft_wrap=True)


def _end(comparisons: Sequence[Comparison]) -> None:
    """Tell every difference on stderr; status 1 if there is one. Under a lossy rule it has to be."""
    measured = [m for c in comparisons for m in (c.plain, c.speculative)]
    if any(measurement.counters.synthetic for measurement in measured):
        typer.echo("synthetic acceptance: drafts were accepted by rate, the outputs mean nothing", err=True)
    if any(measurement.counters.lossy == "typical" for measurement in measured):
        typer.echo("typical acceptance: the outputs have not the model's law", err=True)
    differences = [d for m in measured if not m.counters.lossy for d in m.mismatches]
    for difference in differences:
        typer.echo(f"outputs differ: {difference}", err=True)
    if differences:
        raise typer.Exit(1)
