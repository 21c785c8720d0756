"""``specdecode serve``: an OpenAI-compatible server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from specdecode.contract import ConfigError

from . import arguments
from .arguments import engine_options, parse_option, speculation_of

_SERVER = "Server"
_REQUESTS = "Requests"
_KEYS = "Keys"
_ADAPTERS = "Adapters"


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("serve")(serve)


def serve(
    model: Annotated[str, typer.Argument(help="Model directory, hub id in the local cache, or .gguf file.")],
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=_SERVER)] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="0: any free one.", rich_help_panel=_SERVER)
    ] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="What requests call the model. May be repeated.", rich_help_panel=_SERVER
        ),
    ] = None,
    drain_timeout: Annotated[
        float,
        typer.Option(help="Seconds that open requests have to end after SIGTERM.", rich_help_panel=_SERVER),
    ] = 60.0,
    stuck_after: Annotated[
        float, typer.Option(help="Seconds of a step after which /health fails.", rich_help_panel=_SERVER)
    ] = 120.0,
    log_format: Annotated[
        str, typer.Option(metavar="text|json", help="How logs are written.", rich_help_panel=_SERVER)
    ] = "text",
    log_level: Annotated[
        str, typer.Option(metavar="NAME", help="debug, info, warning or error.", rich_help_panel=_SERVER)
    ] = "info",
    chat_template: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Jinja template instead of the tokenizer's own.", rich_help_panel=_REQUESTS
        ),
    ] = None,
    reasoning_parser: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="How reasoning looks: think, ...; see the manual.", rich_help_panel=_REQUESTS
        ),
    ] = None,
    tool_call_parser: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="How tool calls look: hermes or json.", rich_help_panel=_REQUESTS),
    ] = None,
    max_body_bytes: Annotated[
        int, typer.Option(metavar="N", help="Largest request.", rich_help_panel=_REQUESTS)
    ] = 16 << 20,
    request_timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Cut requests off that take longer.", rich_help_panel=_REQUESTS),
    ] = None,
    max_waiting: Annotated[
        int | None,
        typer.Option(metavar="N", help="Refuse requests while so many are open.", rich_help_panel=_REQUESTS),
    ] = None,
    max_completions: Annotated[
        int, typer.Option(metavar="N", help="Most completions of one request.", rich_help_panel=_REQUESTS)
    ] = 256,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            envvar="SPECDECODE_API_KEY",
            help="Only who has one of these keys is served. May be repeated.",
            rich_help_panel=_KEYS,
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keys, one a line.", rich_help_panel=_KEYS)
    ] = None,
    admin_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            envvar="SPECDECODE_ADMIN_KEY",
            help="Who has it may pause the engine and reset its prefix cache.",
            rich_help_panel=_KEYS,
        ),
    ] = None,
    enable_lora: Annotated[
        bool, typer.Option("--enable-lora", help="Make room for adapters.", rich_help_panel=_ADAPTERS)
    ] = False,
    lora_modules: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PATH",
            help="An adapter, and what requests call it. May be repeated.",
            rich_help_panel=_ADAPTERS,
        ),
    ] = None,
    max_loras: Annotated[
        int | None, typer.Option(metavar="N", help="Most at the same time.", rich_help_panel=_ADAPTERS)
    ] = None,
    max_lora_rank: Annotated[
        int | None, typer.Option(metavar="N", help="Their highest rank.", rich_help_panel=_ADAPTERS)
    ] = None,
    max_cpu_loras: Annotated[
        int | None, typer.Option(metavar="N", help="Most kept on the host.", rich_help_panel=_ADAPTERS)
    ] = None,
    spec_config: arguments.SpecConfig = None,
    spec_method: arguments.SpecMethod = None,
    spec_model: arguments.SpecModel = None,
    spec_tokens: arguments.SpecTokens = None,
    spec_option: arguments.SpecOption = None,
    dtype: arguments.Dtype = "auto",
    quantization: arguments.Quantization = None,
    device: arguments.Device = "auto",
    tensor_parallel_size: arguments.TensorParallelSize = 1,
    max_model_len: arguments.MaxModelLen = None,
    engine_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Any other keyword of EngineArgs, such as max_num_seqs=32. May be repeated.",
            rich_help_panel="Engine",
        ),
    ] = None,
    no_plugin: arguments.NoPlugin = None,
) -> None:
    """Serve a model over HTTP as OpenAI does: /v1/completions, /v1/chat/completions, /v1/models.

    There is a page to try it at /, metrics for Prometheus at /metrics, and /health. SIGTERM ends it when
    the open requests are done.
    """
    speculation = speculation_of(spec_config, spec_method, spec_model, spec_tokens, spec_option)
    options = engine_options(dtype, quantization, device, max_model_len, no_plugin, tensor_parallel_size)
    rooms = {"max_loras": max_loras, "max_lora_rank": max_lora_rank, "max_cpu_loras": max_cpu_loras}
    options |= {name: value for name, value in rooms.items() if value is not None}
    options |= {"enable_lora": True} if enable_lora else {}
    options |= dict(parse_option("--engine-option", option) for option in engine_option or ())
    if lora_modules and not options.get("enable_lora"):
        raise ConfigError("--lora-modules wants room for adapters: add --enable-lora")
    if log_format not in ("text", "json"):
        raise ConfigError(f"--log-format must be text or json, got {log_format!r}")
    if log_level not in ("debug", "info", "warning", "error"):
        raise ConfigError(f"--log-level must be debug, info, warning or error, got {log_level!r}")
    _check_installed()

    from specdecode.config import structure
    from specdecode.serve.logs import log_to
    from specdecode.serve.settings import ServerSettings, read_adapters, read_keys

    given: dict[str, Any] = {
        "served_model_name": tuple(served_model_name or ()),
        "adapters": read_adapters(lora_modules or ()),
        "api_keys": read_keys(api_key or (), api_key_file),
        "admin_key": read_keys([admin_key], None)[0] if admin_key is not None else None,
        "reasoning_parser": reasoning_parser,
        "tool_call_parser": tool_call_parser,
        "chat_template": _read(chat_template),
        "max_body_bytes": max_body_bytes,
        "request_timeout": request_timeout,
        "max_waiting": max_waiting,
        "max_completions": max_completions,
        "stuck_after": stuck_after,
    }
    settings = structure(ServerSettings, given, "serve")
    log_to(format="json" if log_format == "json" else "text", level=log_level)

    from specdecode import AsyncLLM
    from specdecode.serve.run import run

    llm = AsyncLLM(model, speculative_config=speculation, **options)
    try:
        for adapter in settings.adapters:
            llm.engine.add_lora(adapter)
        well = run(llm, settings, host=host, port=port, drain_timeout=drain_timeout)
    finally:
        llm.shutdown()
    if not well:
        raise typer.Exit(1)


def _read(path: Path | None) -> str | None:
    try:
        return None if path is None else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template: cannot read {path}: {error}") from None


def _check_installed() -> None:
    from importlib.util import find_spec

    if missing := [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]:
        raise ConfigError(f"serve wants {' and '.join(missing)}: pip install 'specdec-core[serve]'")
