"""arctic-inference's ``SuffixDecodingCache`` behind this package's interface. Importing this needs it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from arctic_inference.suffix_decoding import SuffixDecodingCache

from .drafting import NOTHING, Draft, Limits


class ArcticCache:
    """Suffix trees in C++ (snowflakedb/ArcticInference): ten times as quick as those in Python.

    Args:
        depth: most tokens matched and drafted together.
        keep: whether outputs are kept, for other requests to draft from.
    """

    def __init__(self, depth: int, keep: bool) -> None:
        # What is forgotten, and when, is decided outside: its own bound counts one cache, and would
        # forget running requests.
        self._cache = SuffixDecodingCache(max_tree_depth=depth, max_cached_requests=-1 if keep else 0)
        self._depth = depth
        self._keep = keep

    def start(self, key: int, prompt: Sequence[int]) -> None:
        self._cache.start_request(key, _int32(prompt))

    def extend(self, key: int, tokens: Sequence[int]) -> None:
        self._cache.add_active_response(key, _int32(tokens))

    def stop(self, key: int) -> None:
        self._cache.stop_request(key)

    def remember(self, key: int, tokens: Sequence[int]) -> None:
        if self._keep:
            self.start(key, ())
            self.extend(key, tokens)
            self.stop(key)

    def forget(self, key: int) -> None:
        if self._keep:
            self._cache.evict_cached_response(key)

    def speculate(self, key: int, context: Sequence[int], limits: Limits) -> Draft:
        if limits.most < 1:
            return NOTHING
        draft = self._cache.speculate(
            key,
            _int32(context[-self._depth :]),
            max_spec_tokens=limits.most,  # left out or 0 it fails, or drafts nothing
            max_spec_factor=limits.factor,
            min_token_prob=limits.min_prob,
            use_tree_spec=limits.tree,
        )
        return Draft(draft.token_ids, draft.parents, draft.probs, draft.score, draft.match_len)


def _int32(tokens: Sequence[int]) -> np.ndarray:
    return np.ascontiguousarray(tokens, dtype=np.int32)
