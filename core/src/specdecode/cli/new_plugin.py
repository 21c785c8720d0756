"""``specdecode new-plugin``: an empty folder to a draft method that works."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("new-plugin")(new_plugin)


def new_plugin(
    name: Annotated[str, typer.Argument(help="The method: lower-case words joined by '-' or '_'.")],
    into: Annotated[Path, typer.Option(help="Where to make the folder specdec-NAME.")] = Path("."),
    author: Annotated[str, typer.Option(help="Who goes into its metadata.")] = "",
    summary: Annotated[str, typer.Option(help="One line about the method.")] = "",
) -> None:
    """Make a draft method of your own: a distribution that installs, drafts and passes its tests as it is."""
    from specdecode.scaffold import new_plugin as render

    made = render(name, into, author=author, summary=summary)
    typer.echo(f"made {made}: its method drafts already; what it drafts is in proposer.py. Now:")
    typer.echo(f"    cd {made}\n    pip install --editable '.[test]'\n    pytest")
