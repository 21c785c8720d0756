"""vLLM's keywords that this engine has no field for: warned about once, or refused with the reason."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ..contract import ConfigError

logger = logging.getLogger(__name__)

#: Accepted without effect: keyword -> why none is needed.
IGNORED = {
    "swap_space": "preempted requests are computed again, not swapped",
    "cpu_offload_gb": "weights stay on the model's device",
    "disable_log_stats": "statistics are read with get_metrics()",
    "disable_custom_all_reduce": "one device has nothing to reduce over",
    "max_seq_len_to_capture": "there are no captured graphs in this version",
    "use_v2_block_manager": "there is one block manager",
    "enable_log_requests": "requests are not logged",
    "disable_log_requests": "requests are not logged",
}

#: Refused: keyword -> why.
REFUSED = {
    "enable_lora": "adapters are not built yet",
    "pipeline_parallel_size": "pipeline parallelism is not built yet",
    "kv_cache_dtype": "the KV cache has the model's dtype in this version",
    "limit_mm_per_prompt": "multimodal models are not built yet",
    "hf_overrides": "edit the model's config.json instead",
}

_warned: set[str] = set()


def drop_foreign(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """``keywords`` without those that have no meaning here.

    Raises:
        ConfigError: names each keyword that would have one and is not built.
    """
    if faults := [
        f"{name}={keywords[name]!r} is refused: {REFUSED[name]}" for name in keywords if name in REFUSED
    ]:
        raise ConfigError(*faults)
    for name in keywords:
        if name in IGNORED and name not in _warned:
            _warned.add(name)
            logger.warning("%s has no effect here: %s", name, IGNORED[name])
    return {name: value for name, value in keywords.items() if name not in IGNORED}
