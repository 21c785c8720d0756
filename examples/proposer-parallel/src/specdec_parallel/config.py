"""The keys of ``speculative_config`` that belong to ``parallel``."""

from __future__ import annotations

import attrs
from specdecode.contract import MAX_SPECULATIVE_TOKENS, option, within
from specdecode.heads.config import HeadFields


@attrs.frozen(kw_only=True)
class ParallelConfig(HeadFields):  # brings model, draft_sample_method and the like
    """A drafter that gives all its tokens in one pass, as P-EAGLE and DFlash do."""

    num_speculative_tokens: int | None = option(
        "draft tokens a step, at most as many as the drafter was trained for; none: as many",
        default=None,
        validator=within(1, MAX_SPECULATIVE_TOKENS),
    )
