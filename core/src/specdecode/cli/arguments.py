"""Command-line options that several commands share, and what they mean."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from specdecode.contract import ConfigError

_SPECULATION = "Speculation"
_ENGINE = "Engine"

Model = Annotated[
    str, typer.Option("--model", "-m", help="Model directory, hub id in the local cache, or .gguf file.")
]
SpecConfig = Annotated[
    str | None,
    typer.Option(
        "--spec-config",
        "--speculative-config",
        metavar="JSON",
        help="The whole speculative_config as JSON.",
        rich_help_panel=_SPECULATION,
    ),
]
SpecMethod = Annotated[
    str | None,
    typer.Option(
        "--spec-method",
        metavar="NAME",
        help="Draft method; see: specdecode plugins list.",
        rich_help_panel=_SPECULATION,
    ),
]
SpecModel = Annotated[
    str | None,
    typer.Option(
        "--spec-model",
        metavar="PATH",
        help="Draft checkpoint, for methods that have one.",
        rich_help_panel=_SPECULATION,
    ),
]
SpecTokens = Annotated[
    int | None,
    typer.Option(
        "--spec-tokens",
        metavar="N",
        help="num_speculative_tokens of the method.",
        rich_help_panel=_SPECULATION,
    ),
]
SpecOption = Annotated[
    list[str] | None,
    typer.Option(
        "--spec-option",
        metavar="KEY=VALUE",
        help="Any other key of speculative_config; the value is JSON, or text. May be repeated.",
        rich_help_panel=_SPECULATION,
    ),
]
Dtype = Annotated[
    str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.", rich_help_panel=_ENGINE)
]
Quantization = Annotated[
    str | None,
    typer.Option(
        "--quantization",
        metavar="NAME",
        help="On a CPU: int8, or gguf, the blocks of a GGUF file as they are.",
        rich_help_panel=_ENGINE,
    ),
]
Device = Annotated[
    str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ...", rich_help_panel=_ENGINE)
]
TensorParallelSize = Annotated[
    int,
    typer.Option(
        "--tensor-parallel-size",
        metavar="N",
        help="GPUs that each hold a share of the model.",
        rich_help_panel=_ENGINE,
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        "--max-model-len", metavar="N", help="Longest sequence, prompt included.", rich_help_panel=_ENGINE
    ),
]
EngineOption = Annotated[
    list[str] | None,
    typer.Option(
        "--engine-option",
        metavar="KEY=VALUE",
        help="Any other keyword of EngineArgs, such as max_num_seqs=32. May be repeated.",
        rich_help_panel=_ENGINE,
    ),
]
NoPlugin = Annotated[
    list[str] | None,
    typer.Option(
        "--no-plugin",
        metavar="NAME",
        help="Do not load this plugin. May be repeated.",
        rich_help_panel=_ENGINE,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def speculation_of(
    config: str | None,
    method: str | None,
    model: str | None,
    tokens: int | None,
    options: Sequence[str] | None,
) -> dict[str, Any] | None:
    """The ``speculative_config`` that the options describe; None if there is none of them.

    Raises:
        ConfigError: they contradict each other or are malformed; what they hold is checked by the engine.
    """
    if config is not None:
        if method is not None or model is not None or tokens is not None or options:
            raise ConfigError(
                "--spec-config is the whole configuration: leave the other --spec-... options out"
            )
        return _parse_config(config)
    entries = parse_options("--spec-option", options)
    if method is not None:
        entries["method"] = method
    if model is not None:
        entries["model"] = model
    if tokens is not None:
        entries["num_speculative_tokens"] = tokens
    return entries or None


def _parse_config(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"--spec-config is not JSON: {error.msg} at column {error.colno} of {text!r}"
        ) from None
    if not isinstance(config, dict):
        raise ConfigError(f'--spec-config must be an object such as {{"method": "..."}}, got {text!r}')
    return config


def parse_option(name: str, option: str) -> tuple[str, Any]:
    """Key and value of ``KEY=VALUE``, whose value is JSON or text; ``name``: what the option is called.

    Raises:
        ConfigError: it is not of that form.
    """
    key, separator, value = option.partition("=")
    if not separator or not key:
        raise ConfigError(f"{name} must be KEY=VALUE, got {option!r}")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def parse_options(name: str, given: Sequence[str] | None) -> dict[str, Any]:
    """What an option that may be repeated was given: see :func:`parse_option`."""
    return dict(parse_option(name, option) for option in given or ())


def engine_options(
    dtype: str,
    quantization: str | None,
    device: str,
    max_model_len: int | None,
    no_plugin: Sequence[str] | None,
    tensor_parallel_size: int = 1,
) -> dict[str, Any]:
    """Keywords of :class:`~specdecode.LLM`."""
    return {
        "dtype": dtype,
        "quantization": quantization,
        "device": device,
        "max_model_len": max_model_len,
        "disable_plugins": tuple(no_plugin or ()),
        "tensor_parallel_size": tensor_parallel_size,
    }


def check_show_drafts(show_drafts: bool, speculation: dict[str, Any] | None) -> None:
    """Refuse ``--show-drafts`` where there can be none."""
    if show_drafts and speculation is None:
        raise ConfigError(
            "--show-drafts has nothing to show without speculation: add --spec-method NAME --spec-tokens N"
        )
