"""``specdecode train METHOD``: one command for each recipe, its options made from the recipe's."""

from __future__ import annotations

import inspect
import json
import logging
from pathlib import Path
from typing import Annotated, Any

import attrs
import typer
from specdecode.config import structure
from specdecode.config.fields import hints_of
from specdecode.contract import SpecdecodeError
from typer.core import TyperGroup

from .options import DataOptions, LoopOptions, PublishOptions
from .recipe import Recipe

_log = logging.getLogger(__name__)

_SHARED = {"Data": DataOptions, "Training": LoopOptions, "Publishing": PublishOptions}


class Recipes(TyperGroup):
    """A subcommand for each recipe of the installed plugins."""

    _made: dict[str, Any] | None = None

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(self._commands())

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return self._commands().get(cmd_name)

    def _commands(self) -> dict[str, Any]:
        if self._made is None:
            made = typer.Typer()
            for name, recipe in recipes().items():
                made.command(name, help=f"Train {recipe.summary}.")(_command(recipe))
            made.callback()(lambda: None)
            group: Any = typer.main.get_group(made)
            self._made = dict(group.commands)
        return self._made


train = typer.Typer(
    cls=Recipes,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train a draft method for a model, on answers of that model, and publish it if it pays.",
)


@train.callback()
def _root() -> None:
    """Train a draft method for a model, on answers of that model, and publish it if it pays."""


def recipes() -> dict[str, Recipe]:
    """The recipes of the installed plugins, by method."""
    from specdecode.plugins import default_manager

    found: dict[str, Recipe] = {}
    for recipe in default_manager().recipes():
        if isinstance(recipe, Recipe):
            found[recipe.name] = recipe
        else:
            _log.error(
                "specdecode_recipes must yield instances of specdec_train.recipe.Recipe, got %r", recipe
            )
    return found


def _command(recipe: Recipe) -> Any:
    """A function whose signature typer reads as the options of ``recipe``."""
    groups = {**_SHARED, f"Method {recipe.name}": recipe.options}

    def command(**given: Any) -> None:
        _train(recipe, given)

    own = [
        _parameter("model", str, ..., "-m", help="Directory, hub id in the local cache, or .gguf file."),
        _parameter(
            "data",
            list[str],
            ...,
            help='JSONL of {"prompt": ...} or {"messages": [...]}, or "self": prompts that the model writes. '
            "May be repeated.",
        ),
        _parameter("out", Path, ..., help="Directory of the run; given again, the run goes on."),
        _parameter(
            "work", Path | None, None, help="Where texts and states are kept, for runs to share; OUT/work."
        ),
        _parameter(
            "dtype",
            str,
            "auto",
            help="Of the target: auto (bfloat16 on a GPU), float32, bfloat16 or float16.",
        ),
        _parameter("device", str, "auto", help="auto, cpu, cuda, cuda:1, ..."),
        _parameter("json", bool, False, help="Print one JSON object instead of text.", flag=True),
    ]
    signature = own + [
        _parameter(field.name, hints_of(cls)[field.name], field.default, help=_help(field), panel=panel)
        for panel, cls in groups.items()
        for field in attrs.fields(cls)
    ]
    command.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]
    return command


def _help(field: Any) -> str:
    doc: str = field.metadata.get("doc", "")
    return doc[:1].upper() + doc[1:] + "."


def _parameter(
    name: str, kind: Any, default: Any, *extra: str, help: str, panel: str | None = None, flag: bool = False
) -> inspect.Parameter:
    option = "--" + name.replace("_", "-")
    if kind is bool and not flag:
        option = f"{option}/--no-{name.replace('_', '-')}"
    info = typer.Option(option, *extra, help=help, rich_help_panel=panel)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if default is ... else default,
        annotation=Annotated[kind, info],
    )


def _train(recipe: Recipe, given: dict[str, Any]) -> None:
    from .pipeline import Run, run
    from .telling import telling

    def part(cls: type) -> Any:
        return structure(cls, {field.name: given[field.name] for field in attrs.fields(cls)}, "train")

    as_json = given["json"]
    try:
        asked = Run(
            recipe=recipe,
            options=part(recipe.options),
            model=given["model"],
            data=tuple(given["data"]),
            out=given["out"],
            work=given["work"] or given["out"] / "work",
            data_options=part(DataOptions),
            loop_options=part(LoopOptions),
            publish_options=part(PublishOptions),
            dtype=given["dtype"],
            device=given["device"],
        )
        with telling() as teller:
            outcome = run(asked, teller)
    except SpecdecodeError as error:
        if as_json:
            typer.echo(json.dumps({"published": False, "error": str(error)}))
            raise typer.Exit(1) from None
        raise
    if as_json:
        typer.echo(json.dumps({"published": True, "path": str(outcome.path), **outcome.report}))
        return
    typer.echo(f"published {outcome.path}")
    typer.echo(f"held out: {outcome.held_out.describe()}")
    if outcome.verdict is not None:
        verdict = outcome.verdict
        typer.echo(
            f"through the engine: acceptance length {verdict.acceptance_length:.2f}, "
            f"{verdict.tokens_per_s:.1f} tokens/s, {verdict.plain_tokens_per_s:.1f} without "
            f"({verdict.speedup:.2f}x)"
        )
