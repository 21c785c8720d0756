"""``specdecode plugins``: what is installed, what a method takes and needs, and whether all of it imports."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from specdecode.contract import TargetInfo
    from specdecode.plugins import MethodRecord, PluginManager, PluginRecord, Prepared

commands = typer.Typer(no_args_is_help=True, help="List, describe and check the installed draft methods.")

#: What stands for a required key when needs are shown and the user gave none; always printed with the needs.
EXAMPLE = {"num_speculative_tokens": 4}

NoPlugin = Annotated[
    list[str] | None,
    typer.Option(
        "--no-plugin", metavar="NAME", help="Do not import this plugin or distribution; repeatable."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    app.add_typer(commands, name="plugins")


@commands.command("list")
def list_plugins(no_plugin: NoPlugin = None, as_json: AsJson = False) -> None:
    """Every installed method and plugin, and how it stands."""
    manager = _manager(no_plugin)
    records, methods = manager.records, manager.methods()
    if as_json:
        _print_json({"plugins": [_plugin(r) for r in records], "methods": [_method(m) for m in methods]})
        return
    rows = [(m.method, m.plugin, f"{m.dist} {m.version}", m.status, m.detail) for m in methods]
    rows += [("-", r.name, f"{r.dist} {r.version}", r.status, r.detail) for r in records if not r.methods]
    if not rows:
        typer.echo(_nothing_installed())
        return
    _print_table(("method", "plugin", "distribution", "status", "detail"), rows)


@commands.command()
def show(
    method: Annotated[str, typer.Argument(help="A method's name, or distribution:name.")],
    model: Annotated[
        str | None,
        typer.Option(help="Target model (directory, hub id in the cache, GGUF): print the needs for it."),
    ] = None,
    spec_config: Annotated[
        str | None, typer.Option(metavar="JSON", help="Keys of the method, to know its needs by.")
    ] = None,
    no_plugin: NoPlugin = None,
    as_json: AsJson = False,
) -> None:
    """The keys a method takes, with defaults, and what it needs of a model."""
    from specdecode.config import fields_of

    manager = _manager(no_plugin)
    provided = manager.resolve(method)
    spec = provided.spec
    record = next(
        m
        for m in manager.methods()
        if (m.method, m.plugin, m.dist) == (spec.name, provided.family, provided.dist)
    )
    fields = fields_of(spec.config)
    given = _given(spec_config, method, [field.name for field in fields if field.required])
    plan = _prepare(manager, given, model) if model is not None else None
    if as_json:
        _print_json(
            {
                **_method(record),
                "api": spec.api,
                "imports": list(spec.imports),
                "config": [_plain(field) for field in fields],
                "model": model,
                "speculative_config": dict(given) if plan else None,
                "needs": _plain(plan.needs) if plan else None,
            }
        )
        return
    typer.echo(f"{record.method}: {record.summary}")
    typer.echo(
        f"plugin {record.plugin} of {record.dist} {record.version}, contract api {spec.api}: {record.status}"
    )
    if record.detail not in ("", record.summary):
        typer.echo(record.detail)
    typer.echo("\nKeys of speculative_config:")
    _print_table(
        ("key", "type", "default", "meaning"),
        [(f.name, f.type, "required" if f.required else repr(f.default), f.doc) for f in fields],
    )
    if plan:
        typer.echo(f"\nNeeds for {model} with {json.dumps(dict(given))}:")
        _print_table(("need", "value"), [(name, _text(value)) for name, value in _plain(plan.needs).items()])


@commands.command()
def check(no_plugin: NoPlugin = None, as_json: AsJson = False) -> None:
    """Import everything each plugin will need, in processes of their own; status 1 if anything is wrong."""
    from rich.console import Console

    from specdecode.plugins.check import check_plugins

    manager = _manager(no_plugin)
    with Console(stderr=True).status("") as status:
        results = check_plugins(manager, started=lambda record: status.update(f"importing {record.dist}"))
    faulty = any(result.faulty for result in results)
    if as_json:
        _print_json(
            {
                "ok": not faulty,
                "plugins": [
                    {
                        **_plugin(result.record),
                        "status": result.status.value,
                        "detail": result.detail,
                        "imports": [_plain(imported) for imported in result.imports],
                    }
                    for result in results
                ],
            }
        )
    elif results:
        _print_table(
            ("plugin", "distribution", "status", "detail"),
            [(r.record.name, f"{r.record.dist} {r.record.version}", r.status, r.detail) for r in results],
        )
    else:
        typer.echo(_nothing_installed())
    if faulty:
        raise typer.Exit(1)


@commands.command()
def conform(
    method: Annotated[str, typer.Argument(help="A method's name, or distribution:name.")],
    config: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="Keys of the method; what it cannot do without is filled in."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Directory of the target to try it on; none: a tiny one of random weights."),
    ] = None,
    device: Annotated[str, typer.Option(help="Where to run; on a GPU rounding may part equal runs.")] = "cpu",
    no_plugin: NoPlugin = None,
) -> None:
    """Try every promise of the contract on a method; status 1 if one is broken. The last line is JSON."""
    from rich.console import Console

    from specdecode.config import fields_of
    from specdecode.testing.conformance import check_proposer

    manager = _manager(no_plugin)
    fields = fields_of(manager.resolve(method).spec.config)
    given = dict(_given(config, method, [field.name for field in fields if field.required]))
    del given["method"]
    with Console(stderr=True).status("") as status:
        report = check_proposer(
            method,
            given,
            target=model,
            device=device,
            manager=manager,
            started=lambda check: status.update(check.id),
        )
    header = report.header
    typer.echo(f"{header.method} of {header.distribution} {header.version}, contract api {header.api}")
    typer.echo(f"specdec-core {header.core}, config {json.dumps(header.config)}\n")
    _print_table(("need", "value"), [(name, _text(value)) for name, value in _plain(header.needs).items()])
    typer.echo()
    _print_table(
        ("check", "outcome", "promise", "detail"),
        [(result.id, result.outcome, result.promise, result.detail) for result in report.results],
    )
    typer.echo(f"\n{report.summary}")
    typer.echo(json.dumps({"ok": report.ok, **_plain(report)}))
    if not report.ok:
        raise typer.Exit(1)


# -- inside -------------------------------------------------------------------------------------------
def _manager(no_plugin: Sequence[str] | None) -> PluginManager:
    from specdecode.plugins import PluginManager

    return PluginManager(disabled=no_plugin or ())


def _given(spec_config: str | None, method: str, required: Iterable[str]) -> Any:
    from specdecode.config import SpeculativeConfig

    given = SpeculativeConfig(spec_config) if spec_config else SpeculativeConfig()
    example = {key: value for key, value in EXAMPLE.items() if key in required}
    return SpeculativeConfig({**example, **given, "method": method})


def _prepare(manager: PluginManager, given: Any, model: str) -> Prepared:
    from specdecode.plugins import prepare

    return prepare(manager, given, _target(model))


def _target(model: str) -> TargetInfo:
    import torch

    from specdecode.models import describe_target, resolve_dtype, resolve_max_model_len, resolve_model

    files = resolve_model(model)
    device = torch.device("cpu")  # needs do not depend on it, and none is used
    return describe_target(
        files,
        dtype=resolve_dtype("auto", files.hf_config, device),
        device=device,
        max_model_len=resolve_max_model_len(None, files.hf_config),
    )


def _nothing_installed() -> str:
    from specdecode.plugins.hints import known_methods

    known = ", ".join(sorted(set(known_methods().values())))
    return f"No plugins are installed; pip install one of: {known}"


def _plugin(record: PluginRecord) -> dict[str, Any]:
    return {
        "name": record.name,
        "distribution": record.dist,
        "version": record.version,
        "target": record.target,
        "status": record.status.value,
        "detail": record.detail,
        "methods": list(record.methods),
    }


def _method(record: MethodRecord) -> dict[str, Any]:
    return {
        "method": record.method,
        "plugin": record.plugin,
        "distribution": record.dist,
        "version": record.version,
        "status": record.status.value,
        "detail": record.detail,
        "summary": record.summary,
    }


def _plain(value: Any) -> Any:
    """``value`` in JSON's types: attrs objects become mappings, enums their values or names."""
    import attrs

    if attrs.has(type(value)):
        return {field.name: _plain(getattr(value, field.name)) for field in attrs.fields(type(value))}
    if isinstance(value, enum.Enum):
        return value.name.lower() if isinstance(value, int) else value.value
    if isinstance(value, dict):
        return {str(key): _plain(element) for key, element in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(_plain(element) for element in value)
    if isinstance(value, (list, tuple)):
        return [_plain(element) for element in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _print_json(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(value, indent=2))


def _print_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in header:
        last = name == header[-1]
        table.add_column(name.upper(), overflow="fold", no_wrap=not last)
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:  # a pipe has no width: a row is a line
        console = Console(markup=False, highlight=False, width=10_000)
    console.print(table)
