"""Counter-based noise: the same value for the same key, on any device, in any order."""

from __future__ import annotations

import torch

from ..gpu import takes
from . import native, reference
from .reference import GUMBEL_MAX, GUMBEL_MIN, philox4x32


def gumbel(
    seed: torch.Tensor,
    index: torch.Tensor,
    position: torch.Tensor,
    token_ids: torch.Tensor | int,
    *,
    stream: torch.Tensor | int = 0,
) -> torch.Tensor:
    """Standard Gumbel noise of each (seed, completion index, position, token id).

    The Philox key is the seed (low word, high word), the counter is ``(token_id // 4, position,
    index, stream)``, and the value comes from word ``token_id % 4`` of the result: injective, so
    that no two arguments share a value, and independent of which other ids are asked for. Word
    ``x`` becomes ``v = (x + 1/2) / 2**32`` and then ``-log(-log(1 - v))``: the upper tail, where
    the winners of an argmax are, keeps full relative precision. Values lie in ``GUMBEL_MIN..GUMBEL_MAX``.

    Args:
        seed: ``[R]`` int64, any bit pattern.
        index, position: ``[R]`` int64, ``0..2**32-1``.
        token_ids: a vocabulary size ``V`` for all of its ids, ``[V]`` int64 for the same ids in
            each row, or ``[R, K]`` int64.
        stream: separates draws that must be independent of each other, ``0..2**32-1``; an int64
            ``[R]``, or one for all rows.

    Returns:
        ``[R, V]`` or ``[R, K]`` float32 on the device of ``seed``; a value is the same on all
        devices up to the rounding of the logarithm.
    """
    if seed.is_cuda and takes():
        from . import gpu

        return gpu.gumbel(seed, index, position, token_ids, stream=stream)
    chosen = native if native.can_draw(seed, index, position, token_ids, stream) else reference
    return chosen.gumbel(seed, index, position, token_ids, stream=stream)


def uniform(
    seed: torch.Tensor,
    index: torch.Tensor,
    position: torch.Tensor,
    token_ids: torch.Tensor,
    *,
    stream: torch.Tensor | int = 0,
) -> torch.Tensor:
    """The uniform number that :func:`gumbel` makes its noise of, for ``token_ids`` ``[R, K]`` int64.

    Returns:
        ``[R, K]`` float32, never 0 and never 1.
    """
    chosen = native if native.can_draw(seed, index, position, token_ids, stream) else reference
    return chosen.uniform(seed, index, position, token_ids, stream=stream)


__all__ = ["GUMBEL_MAX", "GUMBEL_MIN", "gumbel", "philox4x32", "uniform"]
