"""The hooks a plugin may implement. All are cold: called once, while plugins load or a command starts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from specdecode.contract import ProposerSpec

from .markers import hookspec


@hookspec
def specdecode_proposers() -> Iterable[ProposerSpec]:
    """The draft methods this plugin provides.

    Called when plugins load, so it must import nothing heavy::

        @hookimpl
        def specdecode_proposers():
            from .config import MyConfig
            yield ProposerSpec(name="my_method", summary="...", api=1, config=MyConfig, needs=..., build=...)
    """
    return ()


@hookspec
def specdecode_recipes() -> Iterable[Any]:
    """The training recipes this plugin provides, for the trainer to read::

    @hookimpl
    def specdecode_recipes():
        from .recipe import MyRecipe
        yield MyRecipe()
    """
    return ()


@hookspec
def specdecode_executors() -> Iterable[Any]:
    """What can run the other ranks of a model on several devices; see ``distributed_executor_backend``::

    @hookimpl
    def specdecode_executors():
        from .executor import MyExecutor  # a specdecode.distributed.executors.Executor
        yield MyExecutor()
    """
    return ()


@hookspec
def specdecode_cli(subcommands: Any) -> None:
    """Add commands to ``specdecode``; called only when help is shown or the command is none of core's.

    Args:
        subcommands: a ``typer.Typer``::

            @hookimpl
            def specdecode_cli(subcommands):
                @subcommands.command()
                def my_command(path: str) -> None: ...
    """
