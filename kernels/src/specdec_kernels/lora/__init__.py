"""What low-rank adapters add to the products of a linear layer, several adapters side by side.

An adapter adds ``B (A x)`` to ``W x`` (LoRA, arXiv 2106.09685). The adapters of one layer are stacked, each
in a *slot*, and every token names the slot of its own (Punica, arXiv 2310.18547). A token's result depends on
its own adapter alone: not on the tokens beside it, nor on what the other slots hold.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..gpu import takes
from . import reference


def lora_delta(
    x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, slots: torch.Tensor, parts: Sequence[int]
) -> torch.Tensor:
    """``B (A x)`` of each token's adapter, and zeros where a token has none.

    A layer may be several of one input, its *parts*: queries, keys and values for example. Each has an ``A``
    and a ``B`` of its own. ``A x`` is summed in float32 and rounded to the dtype of ``x``, and so is the
    result. Looks at no value on the host, so it can be captured into a CUDA graph.

    Args:
        x: ``[T, K]``, contiguous.
        a: ``[S, P * R, K]``: of ``S`` slots the ``A`` of each part, one below the other; contiguous.
        b: ``[S, N, R]``: the ``B`` of the parts, one below the other; contiguous.
        slots: ``[T]`` int64, each below ``S``; -1: no adapter.
        parts: outputs of each of the ``P`` parts, at most three; ``N`` together.

    Returns:
        ``[T, N]`` of the dtype of ``x``.
    """
    if takes(x, a, b):
        from . import gpu  # needs Triton

        return gpu.lora_delta(x, a, b, slots, parts)
    return reference.lora_delta(x, a, b, slots, parts)


__all__ = ["lora_delta"]
