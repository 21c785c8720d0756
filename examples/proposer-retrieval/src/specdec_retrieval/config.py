"""The keys of ``speculative_config`` that belong to ``retrieval``."""

from __future__ import annotations

from typing import Any

import attrs
from specdecode.contract import LengthFields, option, within

#: Tokens that a datastore is sorted by, so the longest match that can be looked for.
SORTED_TOKENS = 32


def _not_above_max(config: RetrievalConfig, _: Any, value: int) -> None:
    if value > config.retrieval_match_max:
        raise ValueError(f"must be at most retrieval_match_max ({config.retrieval_match_max}), got {value}")


def _share(_: Any, attribute: Any, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"must be between 0 and 1, got {value!r}")


@attrs.frozen(kw_only=True)
class RetrievalConfig(LengthFields):  # brings num_speculative_tokens
    """Drafts from past answers, in the manner of REST (He et al., arXiv 2311.08252)."""

    datastore: str = option(
        "past answers: a directory that `specdecode retrieval build` made, or a file of JSON lines, which is "
        "indexed at each start"
    )
    retrieval_match_max: int = option(
        f"most tokens to match, 1 to {SORTED_TOKENS}", default=16, validator=within(1, SORTED_TOKENS)
    )
    retrieval_match_min: int = option(
        f"fewest tokens to match, 1 to {SORTED_TOKENS}",
        default=2,
        validator=[within(1, SORTED_TOKENS), _not_above_max],
    )
    retrieval_max_matches: int = option(
        "most places of the datastore that are looked at in a step; of more, a sample",
        default=256,
        validator=within(1, 65536),
    )
    retrieval_min_score: float = option(
        "least chance of acceptance of a draft, by the length of the match and how often past answers went "
        "that way, 0 to 1; 0: draft the full length always",
        default=0.2,
        validator=_share,
    )
    retrieval_tree: bool = option(
        "draft several continuations as a tree, instead of the most frequent one", default=False
    )
