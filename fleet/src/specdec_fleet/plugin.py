"""What the plugin manager loads: the command; importing it costs nothing."""

from __future__ import annotations

from typing import Any

from specdecode.plugins import hookimpl


@hookimpl
def specdecode_executors() -> Any:
    from .executor import RayExecutor

    yield RayExecutor()


@hookimpl
def specdecode_cli(subcommands: Any) -> None:
    from .command import fleet

    subcommands.add_typer(fleet, name="fleet")
