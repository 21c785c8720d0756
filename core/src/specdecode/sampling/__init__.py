"""Drawing the target's tokens: each row under its own parameters, history and noise.

The names below load on first use, so that the bookkeeping (:class:`TokenHistory`, seeds) costs no
import of torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .bad_words import BadWords
    from .batch import SampleRow, SamplingBatch
    from .history import TokenHistory, needs_history
    from .laws import law, laws_in_order
    from .logprobs import RowLogprobs, gather_logprobs
    from .processors import LogitsProcessors, ProcessorFault
    from .sampler import UNDRAWABLE, draw, rank, transform
    from .seeds import UnseededStream, resolve_seed
    from .streams import Stream

_HOME = {
    "SampleRow": "batch",
    "SamplingBatch": "batch",
    "TokenHistory": "history",
    "needs_history": "history",
    "law": "laws",
    "laws_in_order": "laws",
    "RowLogprobs": "logprobs",
    "gather_logprobs": "logprobs",
    "BadWords": "bad_words",
    "LogitsProcessors": "processors",
    "ProcessorFault": "processors",
    "UNDRAWABLE": "sampler",
    "draw": "sampler",
    "rank": "sampler",
    "transform": "sampler",
    "Stream": "streams",
    "UnseededStream": "seeds",
    "resolve_seed": "seeds",
}

__all__ = [
    "UNDRAWABLE",
    "BadWords",
    "LogitsProcessors",
    "ProcessorFault",
    "RowLogprobs",
    "SampleRow",
    "SamplingBatch",
    "Stream",
    "TokenHistory",
    "UnseededStream",
    "draw",
    "gather_logprobs",
    "law",
    "laws_in_order",
    "needs_history",
    "rank",
    "resolve_seed",
    "transform",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
