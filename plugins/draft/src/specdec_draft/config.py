"""The keys of ``speculative_config`` that belong to this method."""

from __future__ import annotations

from typing import Literal

import attrs
from specdecode.contract import DraftModelFields, LengthFields, option


@attrs.frozen(kw_only=True)
class DraftModelConfig(LengthFields, DraftModelFields):
    """A draft checkpoint, how it is loaded, and how its tokens are chosen."""

    quantization: Literal["int8", "gguf"] | None = option(
        "quantization of the draft's weights on a CPU: int8, or gguf for a GGUF file's blocks; none: the "
        "checkpoint's own",
        default=None,
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = option(
        "dtype of the draft's weights and KV; none: the target's, or bfloat16 with quantization",
        default=None,
    )
