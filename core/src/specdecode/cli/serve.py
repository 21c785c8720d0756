"""``specdecode serve``: an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from specdecode.contract import ConfigError

from . import arguments, serve_options
from .arguments import engine_options, parse_options, speculation_of

if TYPE_CHECKING:
    from specdecode.serve.settings import ServerSettings


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("serve")(serve)


def serve(
    model: serve_options.Model,
    host: serve_options.Host = "127.0.0.1",
    port: serve_options.Port = 8000,
    served_model_name: serve_options.ServedModelName = None,
    drain_timeout: serve_options.DrainTimeout = 60.0,
    stuck_after: serve_options.StuckAfter = 120.0,
    warm_up: serve_options.WarmUp = None,
    log_format: serve_options.LogFormat = "text",
    log_level: serve_options.LogLevel = "info",
    chat_template: serve_options.ChatTemplate = None,
    reasoning_parser: serve_options.ReasoningParser = None,
    tool_call_parser: serve_options.ToolCallParser = None,
    max_body_bytes: serve_options.MaxBodyBytes = 16 << 20,
    request_timeout: serve_options.RequestTimeout = None,
    max_waiting: serve_options.MaxWaiting = None,
    max_completions: serve_options.MaxCompletions = 256,
    api_key: serve_options.ApiKey = None,
    api_key_file: serve_options.ApiKeyFile = None,
    admin_key: serve_options.AdminKey = None,
    enable_lora: serve_options.EnableLora = False,
    lora_modules: serve_options.LoraModules = None,
    max_loras: serve_options.MaxLoras = None,
    max_lora_rank: serve_options.MaxLoraRank = None,
    max_cpu_loras: serve_options.MaxCpuLoras = None,
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
    engine_option: arguments.EngineOption = None,
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
    options |= parse_options("--engine-option", engine_option)
    if lora_modules and not options.get("enable_lora"):
        raise ConfigError("--lora-modules wants room for adapters: add --enable-lora")
    _check_logs(log_format, log_level)
    if not 0 <= drain_timeout < math.inf:
        raise ConfigError(f"--drain-timeout must be seconds, at least 0, got {drain_timeout:g}")
    _check_installed()

    from specdecode.serve.address import bound
    from specdecode.serve.logs import log_to

    settings = _settings(
        served_model_name=served_model_name,
        lora_modules=lora_modules,
        api_key=api_key,
        api_key_file=api_key_file,
        admin_key=admin_key,
        chat_template=chat_template,
        reasoning_parser=reasoning_parser,
        tool_call_parser=tool_call_parser,
        max_body_bytes=max_body_bytes,
        request_timeout=request_timeout,
        max_waiting=max_waiting,
        max_completions=max_completions,
        stuck_after=stuck_after,
    )
    log_to(format="json" if log_format == "json" else "text", level=log_level)

    with bound(host, port) as address:
        from specdecode import AsyncLLM
        from specdecode.serve import warming
        from specdecode.serve.run import run

        llm = AsyncLLM(model, speculative_config=speculation, **options)
        try:
            for adapter in settings.adapters:
                llm.engine.add_lora(adapter)
            if warm_up is None:
                warm_up = llm.engine.target.device.startswith("cuda")
            if warm_up:
                asyncio.run(warming.warm_up(llm))
            well = run(llm, settings, address, drain_timeout=drain_timeout)
        finally:
            llm.shutdown()
    if not well:
        raise typer.Exit(1)


def _settings(
    *,
    served_model_name: Sequence[str] | None,
    lora_modules: Sequence[str] | None,
    api_key: Sequence[str] | None,
    api_key_file: Path | None,
    admin_key: str | None,
    chat_template: Path | None,
    **plain: Any,
) -> ServerSettings:
    """The server's settings; ``plain``: those that are as they were given."""
    from specdecode.config import structure
    from specdecode.serve.settings import ServerSettings, read_adapters, read_keys

    given: dict[str, Any] = {
        **plain,
        "served_model_name": tuple(served_model_name or ()),
        "adapters": read_adapters(lora_modules or ()),
        "api_keys": read_keys(api_key or (), api_key_file),
        "admin_key": read_keys([admin_key], None)[0] if admin_key is not None else None,
        "chat_template": _read(chat_template),
    }
    return structure(ServerSettings, given, "serve")


def _check_logs(format: str, level: str) -> None:
    if format not in ("text", "json"):
        raise ConfigError(f"--log-format must be text or json, got {format!r}")
    if level not in ("debug", "info", "warning", "error"):
        raise ConfigError(f"--log-level must be debug, info, warning or error, got {level!r}")


def _read(path: Path | None) -> str | None:
    try:
        return None if path is None else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template: cannot read {path}: {error}") from None


def _check_installed() -> None:
    from importlib.util import find_spec

    if missing := [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]:
        raise ConfigError(f"serve wants {' and '.join(missing)}: pip install 'specdec-core[serve]'")
