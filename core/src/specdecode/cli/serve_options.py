"""Options of ``specdecode serve``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_SERVER = "Server"
_REQUESTS = "Requests"
_KEYS = "Keys"
_ADAPTERS = "Adapters"

Model = Annotated[str, typer.Argument(help="Model directory, hub id in the local cache, or .gguf file.")]
Host = Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=_SERVER)]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.", rich_help_panel=_SERVER)]
ServedModelName = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME", help="What requests call the model. May be repeated.", rich_help_panel=_SERVER
    ),
]
DrainTimeout = Annotated[
    float,
    typer.Option(help="Seconds that open requests have to end after SIGTERM.", rich_help_panel=_SERVER),
]
StuckAfter = Annotated[
    float, typer.Option(help="Seconds of a step after which /health fails.", rich_help_panel=_SERVER)
]
WarmUp = Annotated[
    bool | None,
    typer.Option(
        "--warm-up/--no-warm-up",
        help="Answer prompts of all sizes before listening, so that nobody waits for kernels to be compiled; "
        "if neither is given, on a GPU.",
        rich_help_panel=_SERVER,
    ),
]
LogFormat = Annotated[
    str, typer.Option(metavar="text|json", help="How logs are written.", rich_help_panel=_SERVER)
]
LogLevel = Annotated[
    str, typer.Option(metavar="NAME", help="debug, info, warning or error.", rich_help_panel=_SERVER)
]
ChatTemplate = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Jinja template instead of the tokenizer's own.", rich_help_panel=_REQUESTS
    ),
]
ReasoningParser = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="How reasoning looks: think, ...; see the manual.", rich_help_panel=_REQUESTS
    ),
]
ToolCallParser = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="How tool calls look: hermes or json.", rich_help_panel=_REQUESTS),
]
MaxBodyBytes = Annotated[int, typer.Option(metavar="N", help="Largest request.", rich_help_panel=_REQUESTS)]
RequestTimeout = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="Cut requests off that take longer.", rich_help_panel=_REQUESTS),
]
MaxWaiting = Annotated[
    int | None,
    typer.Option(metavar="N", help="Refuse requests while so many are open.", rich_help_panel=_REQUESTS),
]
MaxCompletions = Annotated[
    int, typer.Option(metavar="N", help="Most completions of one request.", rich_help_panel=_REQUESTS)
]
ApiKey = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY",
        envvar="SPECDECODE_API_KEY",
        help="Only who has one of these keys is served. May be repeated.",
        rich_help_panel=_KEYS,
    ),
]
ApiKeyFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Keys, one a line.", rich_help_panel=_KEYS)
]
AdminKey = Annotated[
    str | None,
    typer.Option(
        metavar="KEY",
        envvar="SPECDECODE_ADMIN_KEY",
        help="Who has it may pause the engine, replace its weights and reset its prefix cache.",
        rich_help_panel=_KEYS,
    ),
]
EnableLora = Annotated[
    bool, typer.Option("--enable-lora", help="Make room for adapters.", rich_help_panel=_ADAPTERS)
]
LoraModules = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=PATH",
        help="An adapter, and what requests call it. May be repeated.",
        rich_help_panel=_ADAPTERS,
    ),
]
MaxLoras = Annotated[
    int | None, typer.Option(metavar="N", help="Most at the same time.", rich_help_panel=_ADAPTERS)
]
MaxLoraRank = Annotated[
    int | None, typer.Option(metavar="N", help="Their highest rank.", rich_help_panel=_ADAPTERS)
]
MaxCpuLoras = Annotated[
    int | None, typer.Option(metavar="N", help="Most kept on the host.", rich_help_panel=_ADAPTERS)
]
