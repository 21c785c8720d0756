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

    The speculative engine comes first, so that a fault in its configuration shows before anything is
    loaded twice.

    Args:
        max_batch_size: most requests at a time.
        options: further keywords of both engines.
    """
    options = {"max_batch_size": max_batch_size, **options}
    with (
        engine(model, speculative_config, number=0, **options) as speculative,
        engine(model, None, number=1, **options) as plain,
    ):
        yield plain, speculative


@contextlib.contextmanager
def engine(
    model: str,
    speculative_config: Mapping[str, Any] | None,
    *,
    number: int,
    max_batch_size: int,
    **options: Any,
) -> Iterator[Any]:
    """One of two :class:`~specdecode.LLM` that are open at the same time, closed at the end.

    Prefix caching is off: what one run left behind would shorten the next. It logs no advice: a comparison
    gives its own, from the speedup it measures.

    Args:
        number: 0 or 1: engines that were opened before it and are still there.
    """
    from specdecode import LLM
    from specdecode.engine import advice

    # The fraction counts all that is in use: the second engine adds its half to the first one's.
    share = GPU_MEMORY_UTILIZATION * (number + 1) / 2
    options = {
        "enable_prefix_caching": False,
        "max_num_seqs": max_batch_size,
        "gpu_memory_utilization": share,
        **options,
    }
    config = None if speculative_config is None else dict(speculative_config)
    with _silent(logging.getLogger(advice.__name__)):
        llm = LLM(model, speculative_config=config, **options)
        try:
            yield llm
        finally:
            llm.shutdown()


@contextlib.contextmanager
def _silent(logger: logging.Logger) -> Iterator[None]:
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
