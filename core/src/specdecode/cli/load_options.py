"""Options of ``specdecode bench serve``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_LOAD = "Load"
_REQUESTS = "Requests"
_OBJECTIVES = "Objectives: what counts as goodput"

Url = Annotated[str, typer.Option(help="The server, as http://HOST:PORT, without /v1.")]
Model = Annotated[
    str | None, typer.Option("--model", "-m", help="What the server calls it; its first one if left out.")
]
ApiKey = Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", metavar="KEY", help="Of the server.")]
Rate = Annotated[
    str,
    typer.Option(metavar="R[,R...]", help="Requests a second, or inf: all at once.", rich_help_panel=_LOAD),
]
Duration = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="Send so long, instead of --num-requests.", rich_help_panel=_LOAD),
]
NumRequests = Annotated[
    int, typer.Option(min=1, metavar="N", help="Requests at each rate.", rich_help_panel=_LOAD)
]
Compare = Annotated[
    bool | None,
    typer.Option(
        "--compare/--no-compare",
        help="Ask plain and speculative in turn; on, where a specdecode server speculates.",
        rich_help_panel=_LOAD,
    ),
]
Lengths = Annotated[
    str | None,
    typer.Option(
        metavar="N[,N...]",
        help="Also with at most so many drafts a step, each a side of its own.",
        rich_help_panel=_LOAD,
    ),
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Prompts of your own, as for specdecode bench.", rich_help_panel=_REQUESTS
    ),
]
Dataset = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="A dataset on disk instead.", rich_help_panel=_REQUESTS),
]
DatasetFormat = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Of --dataset: jsonl (if left out), sharegpt, cnn_dailymail, humaneval, mt_bench or messages.",
        rich_help_panel=_REQUESTS,
    ),
]
NumPrompts = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Only the first N of a file of --dataset; left out: 200.",
        rich_help_panel=_REQUESTS,
    ),
]
Task = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Only this task. May be repeated.", rich_help_panel=_REQUESTS),
]
Chat = Annotated[
    bool,
    typer.Option("--chat/--no-chat", help="Ask for chat, or completions.", rich_help_panel=_REQUESTS),
]
MaxTokens = Annotated[int, typer.Option(help="Most tokens of an answer.", rich_help_panel=_REQUESTS)]
IgnoreEos = Annotated[
    bool,
    typer.Option("--ignore-eos", help="Always write max-tokens tokens.", rich_help_panel=_REQUESTS),
]
Temperature = Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=_REQUESTS)]
Seed = Annotated[
    int, typer.Option(help="Of the arrivals, and of sampled requests.", rich_help_panel=_REQUESTS)
]
SloTtft = Annotated[
    float | None, typer.Option(metavar="MS", help="Longest TTFT.", rich_help_panel=_OBJECTIVES)
]
SloInterToken = Annotated[
    float | None,
    typer.Option(metavar="MS", help="Longest mean time between tokens.", rich_help_panel=_OBJECTIVES),
]
SloEndToEnd = Annotated[
    float | None, typer.Option(metavar="MS", help="Longest time in all.", rich_help_panel=_OBJECTIVES)
]
Plot = Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw a plot, as .png or .svg.")]
Output = Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the JSON object to a file.")]
