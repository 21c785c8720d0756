"""``specdecode fleet``: serve a model with many replicas, and answer files of prompts."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from pathlib import Path
from typing import Annotated, Any

import typer
from specdecode.cli import arguments
from specdecode.cli.arguments import engine_options, parse_options, speculation_of
from specdecode.contract import ConfigError, SpecdecodeError

from .causes import cause_of

logger = logging.getLogger("specdecode.fleet")

#: Name of the application in Ray Serve.
APP = "specdecode"
#: Seconds between two looks at the application.
LOOK = 1.0

fleet = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="A model on many GPUs and machines, through Ray: served by replicas, or for files of prompts.",
)

_FLEET = "Fleet"

Address = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Ray cluster: auto, or HOST:PORT; none: one of this machine, for as long as this runs.",
        rich_help_panel=_FLEET,
    ),
]


@fleet.callback()
def _root() -> None:
    """A model on many GPUs and machines, through Ray: served by replicas, or for files of prompts."""


@fleet.command("serve")
def serve_command(
    model: Annotated[str, typer.Argument(help="Model directory or hub id, on every machine.")],
    replicas: Annotated[int, typer.Option(min=1, help="Engines.", rich_help_panel=_FLEET)] = 1,
    max_replicas: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Let Ray Serve have up to N, --replicas being the least.",
            rich_help_panel=_FLEET,
        ),
    ] = None,
    fleet_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Any other key of the fleet, such as retries=2; see the manual. May be repeated.",
            rich_help_panel=_FLEET,
        ),
    ] = None,
    server_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="A setting of the server, such as api_key_file=keys.txt. May be repeated.",
            rich_help_panel=_FLEET,
        ),
    ] = None,
    address: Address = None,
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=_FLEET)] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, rich_help_panel=_FLEET)] = 8000,
    print_config: Annotated[
        bool,
        typer.Option(help="Print the Ray Serve config file of this, and do nothing.", rich_help_panel=_FLEET),
    ] = False,
    spec_config: arguments.SpecConfig = None,
    spec_method: arguments.SpecMethod = None,
    spec_model: arguments.SpecModel = None,
    spec_tokens: arguments.SpecTokens = None,
    spec_option: arguments.SpecOption = None,
    dtype: arguments.Dtype = "auto",
    quantization: arguments.Quantization = None,
    device: arguments.Device = "auto",
    max_model_len: arguments.MaxModelLen = None,
    engine_option: arguments.EngineOption = None,
    no_plugin: arguments.NoPlugin = None,
) -> None:
    """Serve a model with replicas, over HTTP as OpenAI does. SIGTERM ends it when open requests are done."""
    speculation = speculation_of(spec_config, spec_method, spec_model, spec_tokens, spec_option)
    engine = engine_options(dtype, quantization, device, max_model_len, no_plugin)
    engine |= parse_options("--engine-option", engine_option)
    if speculation is not None:
        engine["speculative_config"] = speculation
    fleet_keys = parse_options("--fleet-option", fleet_option)
    if max_replicas is None:
        fleet_keys["num_replicas"] = replicas
    else:
        if max_replicas < replicas:
            raise ConfigError(f"--max-replicas {max_replicas} must be at least --replicas {replicas}")
        scaling = fleet_keys.get("autoscaling_config", {})
        fleet_keys["autoscaling_config"] = {
            "min_replicas": replicas,
            "max_replicas": max_replicas,
            **scaling,
        }
    args = {
        "model": model,
        "engine": engine,
        "server": parse_options("--server-option", server_option),
        "fleet": fleet_keys,
    }

    from .config import FleetArgs

    FleetArgs.of(args)
    if print_config:
        typer.echo(serve_config(args, host, port))
    elif not _serve(args, address, host, port):
        raise typer.Exit(1)


@fleet.command("batch")
def batch_command(
    model: Annotated[str, typer.Argument(help="Model directory or hub id, on every machine.")],
    data: Annotated[
        str,
        typer.Option(
            metavar="PATH", help='JSONL of {"prompt": ...} or {"messages": [...]}, or a folder of such.'
        ),
    ],
    out: Annotated[str, typer.Option(metavar="DIR", help="Folder for JSONL files of rows with answers.")],
    engines: Annotated[int, typer.Option(min=1, help="Engines.", rich_help_panel=_FLEET)] = 1,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Rows handed to an engine at a time.", rich_help_panel=_FLEET)
    ] = 64,
    sampling: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="A field of SamplingParams, such as max_tokens=256. May be repeated.",
            rich_help_panel="Sampling",
        ),
    ] = None,
    address: Address = None,
    spec_config: arguments.SpecConfig = None,
    spec_method: arguments.SpecMethod = None,
    spec_model: arguments.SpecModel = None,
    spec_tokens: arguments.SpecTokens = None,
    spec_option: arguments.SpecOption = None,
    dtype: arguments.Dtype = "auto",
    quantization: arguments.Quantization = None,
    device: arguments.Device = "auto",
    max_model_len: arguments.MaxModelLen = None,
    engine_option: arguments.EngineOption = None,
    no_plugin: arguments.NoPlugin = None,
) -> None:
    """Answer the rows of a file, through Ray Data."""
    speculation = speculation_of(spec_config, spec_method, spec_model, spec_tokens, spec_option)
    engine = engine_options(dtype, quantization, device, max_model_len, no_plugin)
    engine |= parse_options("--engine-option", engine_option)
    fields = parse_options("--sampling", sampling)

    import ray
    from specdecode import SamplingParams

    from .batch import generate

    _check_fields(SamplingParams, fields)
    params = SamplingParams(**fields) if fields else None
    ray.init(address=address)
    try:
        try:
            rows = ray.data.read_json(data)
        except OSError as error:
            raise ConfigError(f"--data: cannot read {data}: {error.strerror or 'no such file'}") from None
        answered = generate(
            rows,
            model,
            params,
            num_engines=engines,
            batch_size=batch_size,
            speculative_config=speculation,
            **engine,
        ).materialize()
        answered.write_json(str(Path(out).absolute()))
        failed = answered.filter(lambda row: bool(row["error"])).count()
        typer.echo(f"{answered.count()} rows, {failed} of them with an error, in {out}")
    except ray.exceptions.RayError as error:
        raise SpecdecodeError(f"Ray Data could not answer {data}: {cause_of(str(error))}") from error
    finally:
        ray.shutdown()


def _check_fields(params: type, fields: dict[str, Any]) -> None:
    import attrs

    known = {field.name for field in attrs.fields(params) if field.init}
    if unknown := sorted(set(fields) - known):
        raise ConfigError(f"--sampling {unknown[0]} is no field of SamplingParams; see docs/sampling.md")


def serve_config(args: dict[str, Any], host: str, port: int) -> str:
    """The Ray Serve config file of a fleet; JSON, which is YAML too."""
    application = {"name": APP, "route_prefix": "/", "import_path": "specdec_fleet:build", "args": args}
    config = {"http_options": {"host": host, "port": port}, "applications": [application]}
    return json.dumps(config, indent=2)


def _serve(args: dict[str, Any], address: str | None, host: str, port: int) -> bool:
    """Serve until SIGTERM or SIGINT; False if the application has failed."""
    import ray
    from ray import serve

    from .app import build

    ending, status = threading.Event(), None
    # A replica that hangs is to give its devices back at once, not after its time for open requests.
    os.environ.setdefault("RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS", "1")
    ray.init(address=address)
    for number in (signal.SIGTERM, signal.SIGINT):  # now, as Ray has just put its own handlers there
        signal.signal(number, lambda *_: ending.set())
    try:
        serve.start(http_options={"host": host, "port": port}, proxy_location="HeadOnly")
        serve.run(build(args), name=APP, blocking=False)
        typer.echo(f"serving at http://{host}:{port}", err=True)
        well = True
        while well and not ending.wait(LOOK):
            status = serve.status().applications.get(APP)
            well = status is not None and status.status not in ("DEPLOY_FAILED", "UNHEALTHY")
        if not well:
            logger.critical("the application is no longer served: %s", _reason(status))
        serve.delete(APP)  # open requests are finished first
        return well
    except RuntimeError as error:
        reason = _reason(serve.status().applications.get(APP)) or error
        raise SpecdecodeError(f"Ray Serve could not start the fleet: {reason}") from error
    finally:
        ray.shutdown()


def _reason(application: Any) -> str:
    """Why it is not served, as its replicas and doors told it; ``application``: its status, or None."""
    if application is None:
        return ""
    failed = [one for one in application.deployments.values() if one.status in ("DEPLOY_FAILED", "UNHEALTHY")]
    told = dict.fromkeys(cause_of(one.message) for one in failed if one.message)
    return "; ".join(told) or application.message
