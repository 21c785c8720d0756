"""What the plugin manager loads; importing it costs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdecode.contract import BuildContext, Needs, PlanContext, Proposer, ProposerSpec, Shape, Tokens
from specdecode.plugins import hookimpl

if TYPE_CHECKING:
    from .config import RetrievalConfig


@hookimpl
def specdecode_proposers() -> Iterator[ProposerSpec]:
    from .config import RetrievalConfig

    yield ProposerSpec(
        name="retrieval",
        summary="drafts from a datastore of past answers (REST)",
        api=1,
        config=RetrievalConfig,
        needs=_needs,
        build=_build,
    )


@hookimpl
def specdecode_cli(subcommands: Any) -> None:
    from .commands import retrieval

    subcommands.add_typer(retrieval, name="retrieval")


def _needs(config: RetrievalConfig, context: PlanContext) -> Needs:
    from .datastore import check

    check(Path(config.datastore).expanduser(), context.target)  # before the target's weights are loaded
    length = config.num_speculative_tokens
    return Needs(
        width=length,
        depth=length,
        shape=Shape.TREE if config.retrieval_tree else Shape.CHAIN,
        tokens=Tokens.HISTORY,
        scores=True,
        continues=True,
    )


def _build(config: RetrievalConfig, context: BuildContext) -> Proposer:
    from .datastore import load
    from .proposer import RetrievalProposer  # heavy modules are imported here, on use

    return RetrievalProposer(config, load(Path(config.datastore).expanduser(), context.target))
