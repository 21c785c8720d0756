"""``specdecode bench serve``: any OpenAI-compatible server under load."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import typer

from specdecode.contract import ConfigError

from . import arguments, load_options
from .progress import progress_bar

if TYPE_CHECKING:
    from specdecode.bench.load import Run, Side, Target
    from specdecode.bench.load_report import Objectives
    from specdecode.bench.tasks import Prompt


def bench_serve(
    url: load_options.Url,
    model: load_options.Model = None,
    api_key: load_options.ApiKey = None,
    rate: load_options.Rate = "1",
    duration: load_options.Duration = None,
    num_requests: load_options.NumRequests = 50,
    compare: load_options.Compare = None,
    lengths: load_options.Lengths = None,
    prompts: load_options.Prompts = None,
    dataset: load_options.Dataset = None,
    dataset_format: load_options.DatasetFormat = None,
    num_prompts: load_options.NumPrompts = None,
    task: load_options.Task = None,
    chat: load_options.Chat = True,
    max_tokens: load_options.MaxTokens = 128,
    ignore_eos: load_options.IgnoreEos = False,
    temperature: load_options.Temperature = 0.0,
    seed: load_options.Seed = 0,
    slo_ttft: load_options.SloTtft = None,
    slo_inter_token: load_options.SloInterToken = None,
    slo_end_to_end: load_options.SloEndToEnd = None,
    plot: load_options.Plot = None,
    as_json: arguments.AsJson = False,
    output: load_options.Output = None,
) -> None:
    """Send real prompts to a server at given rates: TTFT, inter-token and end-to-end times, goodput.

    Every side of a comparison gets the same prompts at the same times. Ends with status 1 if a request
    failed.
    """
    from .bench import check_folder, tasks_of, write

    if find_spec("httpx") is None:
        raise ConfigError("bench serve wants httpx: pip install 'specdec-core[serve]'")
    from specdecode.bench.load import Target, served_method, served_model
    from specdecode.bench.load_report import Objectives, check_plot, row_of, table_of
    from specdecode.bench.load_report import as_json as report
    from specdecode.bench.load_report import plot as draw

    rates = _rates(rate)
    if duration is not None and not duration > 0:
        raise ConfigError(f"--duration must be above 0, got {duration:g}")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url must begin with http:// or https://, got {url!r}")
    check_folder(output)
    if plot is not None:
        check_plot(plot)
    tasks = tasks_of(prompts, dataset, dataset_format, num_prompts, task, most=200)
    asked = [prompt for one in tasks for prompt in one.prompts]
    target = Target(
        url=url.rstrip("/").removesuffix("/v1"),
        model=model or "",
        api_key=api_key,
        chat=chat,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        ignore_eos=ignore_eos,
    )
    if model is None:
        target = _of_model(target, asyncio.run(served_model(target)))
    method = asyncio.run(served_method(target)) if compare is not False else None
    sides = _sides(method, compare, lengths)
    runs = _run(target, sides, asked, rates, duration, num_requests)
    objectives = Objectives(ttft_ms=slo_ttft, inter_token_ms=slo_inter_token, end_to_end_ms=slo_end_to_end)
    rows = [row_of(run, objectives) for run in runs]
    source = str(dataset or prompts or "built-in")
    result = json.dumps(report(_environment(target, method, source, len(asked), objectives), rows))
    if output is not None:
        write(output, result)
    if plot is not None:
        draw(rows, plot, f"{target.model} at {target.url}")
    if as_json:
        typer.echo(result)
    else:
        from rich.console import Console

        Console().print(table_of(rows, f"{target.model} at {target.url}; times are P50/P95/P99"))
    for message in dict.fromkeys(message for row in rows for message in row.errors):
        typer.echo(f"failed: {message}", err=True)
    if any(row.failed for row in rows):
        raise typer.Exit(1)


def _environment(
    target: Target, method: str | None, prompts: str, num_prompts: int, objectives: Objectives
) -> dict[str, Any]:
    """What of the run is told beside its figures."""
    return {
        "url": target.url,
        "model": target.model,
        "method": method,
        "prompts": prompts,
        "num_prompts": num_prompts,
        "endpoint": target.path,
        "max_tokens": target.max_tokens,
        "ignore_eos": target.ignore_eos,
        "temperature": target.temperature,
        "seed": target.seed,
        "objectives": {
            "ttft_ms": objectives.ttft_ms,
            "inter_token_ms": objectives.inter_token_ms,
            "end_to_end_ms": objectives.end_to_end_ms,
        },
    }


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(rate > 0 for rate in rates):
        raise ConfigError(f"--rate must be numbers above 0, or inf, with commas between; got {text!r}")
    return rates


def _of_model(target: Target, model: str) -> Target:
    import attrs

    return attrs.evolve(target, model=model)


def _sides(method: str | None, compare: bool | None, lengths: str | None) -> list[Side]:
    from specdecode.bench.load import Side

    sides = [Side(name="served")]
    if method is not None or compare:
        sides = [Side(name="plain", body={"speculation": False}), Side(name=method or "speculative")]
    for part in (lengths or "").split(",") if lengths else ():
        if not part.strip().isdigit() or int(part) < 1:
            raise ConfigError(f"--lengths must be positive integers with commas between, got {lengths!r}")
        sides.append(Side(name=f"at most {int(part)}", body={"speculation": int(part)}))
    return sides


def _run(
    target: Target,
    sides: Sequence[Side],
    asked: Sequence[Prompt],
    rates: Sequence[float],
    duration: float | None,
    num_requests: int,
) -> list[Run]:
    """Every side at every rate; the sides of a rate follow each other."""
    from specdecode.bench.load import count_requests, run_load

    counts = {rate: count_requests(rate, duration, num_requests) for rate in rates}
    runs = []
    with progress_bar("Asking", len(sides) * sum(counts[rate] for rate in rates)) as advance:
        for side in sides:  # what only the first request pays for
            asyncio.run(run_load(target, side, asked[:1], math.inf, 1))
        for rate in rates:
            for side in sides:
                runs.append(asyncio.run(run_load(target, side, asked, rate, counts[rate], advance=advance)))
    return runs
