"""What the plugin manager loads; importing it costs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from specdecode.contract import (
    BuildContext,
    Memory,
    Needs,
    PlanContext,
    Proposer,
    ProposerSpec,
    Shape,
    Tokens,
)
from specdecode.plugins import hookimpl

if TYPE_CHECKING:
    from .config import SuffixConfig


@hookimpl
def specdecode_proposers() -> Iterator[ProposerSpec]:
    from .config import SuffixConfig

    yield ProposerSpec(
        name="suffix",
        summary="suffix decoding: what followed the last tokens, in this request or an earlier one",
        api=1,
        config=SuffixConfig,
        needs=_needs,
        build=_build,
    )


def _needs(config: SuffixConfig, context: PlanContext) -> Needs:
    from .backends import check_backend

    check_backend(config.backend)
    if config.suffix_decoding_cache_path is not None:
        from .storage import check_file

        check_file(config, context.target.vocab_size)  # before the target's weights are loaded
    deepest = min(config.length, config.suffix_decoding_max_tree_depth - 1)
    tree = config.suffix_decoding_use_tree_spec
    return Needs(
        width=config.length,
        depth=deepest if tree else config.length,
        shape=Shape.TREE if tree else Shape.CHAIN,
        tokens=Tokens.HISTORY,
        memory=Memory.NAMESPACE,
        scores=True,
        continues=True,
    )


def _build(config: SuffixConfig, context: BuildContext) -> Proposer:
    from .proposer import SuffixProposer

    return SuffixProposer(config, context.target.vocab_size)
