"""Tells the target which adapter each token of a forward has."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from ..models import Decoder, TransformersDecoder


def adapted(model: Decoder | TransformersDecoder, slots: torch.Tensor | None) -> AbstractContextManager[None]:
    """Inside, forwards of ``model`` are of tokens whose adapters are in ``slots``.

    Args:
        slots: ``[T]`` int64, -1: no adapter; None: no token has one.
    """
    return nullcontext() if model.adapters is None else model.adapters.of(slots)


def first_adapter(model: Decoder | TransformersDecoder, tokens: torch.Tensor) -> torch.Tensor | None:
    """Slots of ``tokens`` that have the first adapter, whatever it is, to see what a step of such takes."""
    return None if model.adapters is None else torch.zeros_like(tokens)
