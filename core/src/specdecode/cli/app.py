"""The ``specdecode`` command: its subcommands, those that plugins add, and how errors are told."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from specdecode.contract import SpecdecodeError

from . import bench, chat, generate, new_plugin, plugins, replay, serve


class Commands(TyperGroup):
    """Core's commands, then those of plugins; plugins are loaded only when core has no such command."""

    _of_plugins: dict[str, Any] | None = None

    def list_commands(self, ctx: Any) -> list[str]:
        own = super().list_commands(ctx)
        return [*own, *(name for name in self._added() if name not in own)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return super().get_command(ctx, cmd_name) or self._added().get(cmd_name)

    def main(self, *args: Any, **extra: Any) -> Any:
        try:
            return super().main(*args, **extra)
        except SpecdecodeError as error:
            typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
            raise SystemExit(1) from None

    def _added(self) -> dict[str, Any]:
        if self._of_plugins is None:
            from specdecode.plugins import default_manager

            added = typer.Typer()
            default_manager().add_commands(added)
            # A callback makes typer build a group even of a single command.
            added.callback()(lambda: None)
            group: Any = typer.main.get_group(added)
            self._of_plugins = dict(group.commands)
        return self._of_plugins


app = typer.Typer(
    name="specdecode",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="LLM inference with speculative decoding; every draft method is a plugin.",
)


def _version(wanted: bool) -> None:
    if wanted:
        from specdecode.plugins.discovery import CORE, core_version

        typer.echo(f"{CORE} {core_version() or '(not installed)'}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """LLM inference with speculative decoding; every draft method is a plugin."""


for module in (generate, chat, serve, bench, replay, plugins, new_plugin):
    module.register(app)
