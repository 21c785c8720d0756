"""The keys of ``speculative_config`` that belong to this method, spelt as vLLM spells them."""

from __future__ import annotations

from typing import Literal

import attrs
from specdecode.contract import MAX_SPECULATIVE_TOKENS, option, within


@attrs.frozen(kw_only=True)
class SuffixConfig:
    """Suffix decoding (Oliaro et al., arXiv 2411.04975) over prompts and past outputs."""

    num_speculative_tokens: int | None = option(
        f"most draft tokens a step, 1 to {MAX_SPECULATIVE_TOKENS}; none: suffix_decoding_max_tree_depth",
        default=None,
        validator=within(1, MAX_SPECULATIVE_TOKENS),
    )
    suffix_decoding_max_tree_depth: int = option(
        f"most tokens matched and drafted together, 2 to {MAX_SPECULATIVE_TOKENS}",
        default=24,
        validator=within(2, MAX_SPECULATIVE_TOKENS),
    )
    suffix_decoding_max_cached_requests: int = option(
        "past requests whose outputs are remembered, the oldest forgotten first; 0: none, a request is "
        "drafted from its own text alone",
        default=10_000,
        validator=within(0),
    )
    suffix_decoding_max_cached_tokens: int = option(
        "tokens of past outputs that are remembered, the oldest output forgotten first; each takes 0.2 to "
        "0.4 KB of host memory",
        default=1_000_000,
        validator=within(0),
    )
    suffix_decoding_max_spec_factor: float = option(
        "draft tokens for each token of the context that occurred before, 0 to 1024",
        default=1.0,
        validator=within(0, 1024),
    )
    suffix_decoding_min_token_prob: float = option(
        "least probability of a draft token, by how often its path was taken before, 0 to 1",
        default=0.1,
        validator=within(0, 1),
    )
    suffix_decoding_use_tree_spec: bool = option(
        "draft several continuations as a tree, instead of the likeliest", default=False
    )
    suffix_decoding_share_namespaces: bool = option(
        "draft from the outputs of all namespaces (cache_salt, API key), not of the request's own alone",
        default=False,
    )
    suffix_decoding_cache_path: str | None = option(
        "file that remembered outputs are loaded from at start, if it exists, and saved to at the end",
        default=None,
    )
    backend: Literal["auto", "arctic", "python"] = option(
        "whose suffix tree: arctic-inference's, this package's own, or arctic-inference's if it is installed",
        default="auto",
    )

    @property
    def length(self) -> int:
        """Most draft tokens a step."""
        return self.num_speculative_tokens or self.suffix_decoding_max_tree_depth

    @property
    def remembers(self) -> bool:
        """Whether outputs outlive their requests."""
        return min(self.suffix_decoding_max_cached_requests, self.suffix_decoding_max_cached_tokens) > 0
