"""Options of ``specdecode bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Prompts = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Prompts of your own: one a line, or .jsonl with 'prompt' and perhaps 'task'. "
        "Without it: the built-in tasks.",
    ),
]
Dataset = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="A dataset on disk instead: JSON lines, JSON or CSV, perhaps gzipped. Or 'repetitive': "
        "built-in tasks done again and again, for methods that remember outputs.",
    ),
]
DatasetFormat = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Of --dataset: jsonl (if left out), sharegpt, cnn_dailymail, humaneval, mt_bench or messages.",
    ),
]
NumPrompts = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Only the first N prompts of a file of --dataset; left out: 80."),
]
Task = Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only this task. May be repeated.")]
BatchSize = Annotated[
    str,
    typer.Option(metavar="N[,N...]", help="How many requests run at a time; several: one after the other."),
]
MaxTokens = Annotated[int, typer.Option(help="Most tokens of an output.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Always write max-tokens tokens.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy; else sampled with --seed.")]
TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens that hold this mass.")]
Seed = Annotated[int, typer.Option(help="Seed of every sampled request.")]
Repeats = Annotated[int, typer.Option(min=1, help="Runs of each prompt on each side.")]
Chat = Annotated[
    bool, typer.Option("--chat/--no-chat", help="Put prompts into the chat template, if there is one.")
]
Output = Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the JSON object to a file.")]
Profile = Annotated[
    bool,
    typer.Option("--profile", help="Also tell where a decode step's time goes, and write a trace of it."),
]
TraceDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Where --profile writes traces, for Perfetto or chrome://tracing; left out: specdec-traces.",
    ),
]
Adaptive = Annotated[
    bool,
    typer.Option("--adaptive", help="Let core choose each draft's length, --spec-tokens at most."),
]
