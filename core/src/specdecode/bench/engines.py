"""The two engines that a comparison runs on."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

#: Share of a GPU's memory that both engines together may fill.
GPU_MEMORY_UTILIZATION = 0.9


@contextlib.contextmanager
def engine_pair(
    model: str, speculative_config: Mapping[str, Any], *, max_batch_size: int, **options: Any
) -> Iterator[tuple[Any, Any]]:
    """A plain and a speculative :class:`~specdecode.LLM` of one model, closed at the end.

    Prefix caching is off: what one run left behind would shorten the next. The speculative engine
    comes first, so that a fault in its configuration shows before anything is loaded twice. Neither
    logs advice: a comparison gives its own, from the speedup it measures.

    Args:
        max_batch_size: most requests at a time.
        options: further keywords of both engines.
    """
    from specdecode import LLM
    from specdecode.engine import advice

    options = {"enable_prefix_caching": False, "max_num_seqs": max_batch_size, **options}
    with contextlib.ExitStack() as stack:
        stack.enter_context(_silent(logging.getLogger(advice.__name__)))
        # The fraction counts all that is in use: the second engine adds its half to the first one's.
        half, whole = GPU_MEMORY_UTILIZATION / 2, GPU_MEMORY_UTILIZATION
        speculative = LLM(
            model, speculative_config=dict(speculative_config), gpu_memory_utilization=half, **options
        )
        stack.callback(speculative.shutdown)
        plain = LLM(model, gpu_memory_utilization=whole, **options)
        stack.callback(plain.shutdown)
        yield plain, speculative


@contextlib.contextmanager
def _silent(logger: logging.Logger) -> Iterator[None]:
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
