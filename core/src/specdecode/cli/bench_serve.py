"""``specdecode bench serve``: any OpenAI-compatible server under load."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdecode.contract import ConfigError

from . import arguments
from .progress import progress_bar

if TYPE_CHECKING:
    from specdecode.bench.load import Run, Side, Target

_LOAD = "Load"
_REQUESTS = "Requests"
_OBJECTIVES = "Objectives: what counts as goodput"


def bench_serve(
    url: Annotated[str, typer.Option(help="The server, as http://HOST:PORT, without /v1.")],
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="What the server calls it; its first one if left out.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", metavar="KEY", help="Of the server.")
    ] = None,
    rate: Annotated[
        str,
        typer.Option(
            metavar="R[,R...]", help="Requests a second, or inf: all at once.", rich_help_panel=_LOAD
        ),
    ] = "1",
    duration: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", help="Send so long, instead of --num-requests.", rich_help_panel=_LOAD
        ),
    ] = None,
    num_requests: Annotated[
        int, typer.Option(min=1, metavar="N", help="Requests at each rate.", rich_help_panel=_LOAD)
    ] = 50,
    compare: Annotated[
        bool | None,
        typer.Option(
            "--compare/--no-compare",
            help="Ask plain and speculative in turn; on, where a specdecode server speculates.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N...]",
            help="Also with at most so many drafts a step, each a side of its own.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Prompts of your own, as for specdecode bench.", rich_help_panel=_REQUESTS
        ),
    ] = None,
    dataset: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A dataset on disk instead.", rich_help_panel=_REQUESTS),
    ] = None,
    dataset_format: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="jsonl, sharegpt, cnn_dailymail, humaneval or mt_bench.",
            rich_help_panel=_REQUESTS,
        ),
    ] = "jsonl",
    num_prompts: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="Only the first N of the dataset.", rich_help_panel=_REQUESTS),
    ] = 200,
    task: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this task. May be repeated.", rich_help_panel=_REQUESTS),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat/--no-chat", help="Ask for chat, or completions.", rich_help_panel=_REQUESTS),
    ] = True,
    max_tokens: Annotated[
        int, typer.Option(help="Most tokens of an answer.", rich_help_panel=_REQUESTS)
    ] = 128,
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos", help="Always write max-tokens tokens.", rich_help_panel=_REQUESTS),
    ] = False,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=_REQUESTS)] = 0.0,
    seed: Annotated[
        int, typer.Option(help="Of the arrivals, and of sampled requests.", rich_help_panel=_REQUESTS)
    ] = 0,
    slo_ttft: Annotated[
        float | None, typer.Option(metavar="MS", help="Longest TTFT.", rich_help_panel=_OBJECTIVES)
    ] = None,
    slo_inter_token: Annotated[
        float | None,
        typer.Option(metavar="MS", help="Longest mean time between tokens.", rich_help_panel=_OBJECTIVES),
    ] = None,
    slo_end_to_end: Annotated[
        float | None, typer.Option(metavar="MS", help="Longest time in all.", rich_help_panel=_OBJECTIVES)
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also draw a plot, as .png or .svg.")
    ] = None,
    as_json: arguments.AsJson = False,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the JSON object to a file.")
    ] = None,
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
    texts = [
        p.text for one in tasks_of(prompts, dataset, dataset_format, num_prompts, task) for p in one.prompts
    ]
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
    runs = _run(target, sides, texts, rates, duration, num_requests)
    objectives = Objectives(ttft_ms=slo_ttft, inter_token_ms=slo_inter_token, end_to_end_ms=slo_end_to_end)
    rows = [row_of(run, objectives) for run in runs]
    environment: dict[str, Any] = {
        "url": target.url,
        "model": target.model,
        "method": method,
        "prompts": str(dataset or prompts or "built-in"),
        "num_prompts": len(texts),
        "endpoint": target.path,
        "max_tokens": max_tokens,
        "ignore_eos": ignore_eos,
        "temperature": temperature,
        "seed": seed,
        "objectives": {
            "ttft_ms": slo_ttft,
            "inter_token_ms": slo_inter_token,
            "end_to_end_ms": slo_end_to_end,
        },
    }
    result = json.dumps(report(environment, rows))
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
    texts: Sequence[str],
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
            asyncio.run(run_load(target, side, texts[:1], math.inf, 1))
        for rate in rates:
            for side in sides:
                runs.append(asyncio.run(run_load(target, side, texts, rate, counts[rate], advance=advance)))
    return runs
