"""The residual stream between two products, in the form in which the next one reads it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: Columns that one partial sum of squares covers, as a rule.
COLUMNS = 64
#: The partial sums' rows are padded to a multiple of this many tokens.
_PADDING = 16


@dataclass(eq=False)
class Stream:
    """``T`` tokens' residual stream of width ``H``, and what an RMS norm needs of it.

    A norm is a gain for each column and a scale for each token. The gain is applied by whoever
    writes the stream, the scale by whoever multiplies it by a matrix, to the whole products: no
    launch is left for the norm itself.

    Attributes:
        residual: ``[T, H]``.
        scaled: ``[T, H]``, ``residual`` times the gain of the norm that comes next, of its dtype.
        squares: ``[ceil(H / columns), >= T]`` float32, sums of ``residual^2`` over so many columns each.
            None: ``scaled``, of any width, is multiplied as it is; whatever norm there was is in it.
        columns: 64, or fewer where a product's tiles are lower.
    """

    residual: torch.Tensor
    scaled: torch.Tensor
    squares: torch.Tensor | None
    columns: int = COLUMNS

    @staticmethod
    def empty(tokens: int, width: int, like: torch.Tensor, columns: int = COLUMNS) -> Stream:
        """An uninitialised stream of the dtype and device of ``like``."""
        residual, scaled = like.new_empty(tokens, width), like.new_empty(tokens, width)
        parts, padded = -(-width // columns), -(-tokens // _PADDING) * _PADDING
        return Stream(residual, scaled, like.new_empty((parts, padded), dtype=torch.float32), columns)
