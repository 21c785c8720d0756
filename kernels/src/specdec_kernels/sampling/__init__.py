"""From logits to the distribution a request asked for, and the draw from it.

All work on ``[R, V]`` float32 logits, in place where the name is a verb on the logits, and a row's
result never depends on the other rows, to the bit.
"""

from .reference import (
    add_bias,
    ban_tokens,
    keep_bits,
    keep_min_p,
    keep_tokens,
    keep_top_k,
    keep_top_p,
    log_normalizer,
    penalize,
    perturb,
    scale_temperature,
    top_scores,
)

__all__ = [
    "add_bias",
    "ban_tokens",
    "keep_bits",
    "keep_min_p",
    "keep_tokens",
    "keep_top_k",
    "keep_top_p",
    "log_normalizer",
    "penalize",
    "perturb",
    "scale_temperature",
    "top_scores",
]
