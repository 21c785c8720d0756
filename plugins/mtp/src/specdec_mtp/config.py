"""The keys of ``speculative_config`` that belong to the method."""

from __future__ import annotations

from typing import Literal

import attrs
from specdecode.contract import MAX_SPECULATIVE_TOKENS, option, within
from specdecode.heads.config import HeadFields


@attrs.frozen(kw_only=True)
class MtpConfig(HeadFields):
    """A chain; nothing has to be set for a target that carries its layers."""

    model: str | None = option(  # type: ignore[assignment]  # of other methods it is required
        "path or hub id of a checkpoint that holds the layers; none: the target's own", default=None
    )
    num_speculative_tokens: int | None = option(
        f"draft tokens a step, 1 to {MAX_SPECULATIVE_TOKENS}; none: as many as the checkpoint has modules, "
        "or what one in the speculators format proposes",
        default=None,
        validator=within(1, MAX_SPECULATIVE_TOKENS),
    )
    mtp_hidden_states: Literal["normed", "raw"] = option(
        "whether a module reads the target's and its predecessor's hidden states behind the final norm, or "
        "raw: before it",
        default="normed",
    )
