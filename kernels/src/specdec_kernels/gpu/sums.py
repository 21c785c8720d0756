"""Sums whose order is written down, so that no layout of a tile can change a bit of them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def neighbours(x, ROWS: tl.constexpr, B: tl.constexpr):
    """Even and odd rows of ``[ROWS, B]``."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS // 2, 2, B)), (0, 2, 1)))


@triton.jit
def tree_sum(x, ROWS: tl.constexpr, B: tl.constexpr, COUNT: tl.constexpr):
    """Sums of ``COUNT`` rows that stand together: ``[ROWS, B] -> [ROWS / COUNT, B]``, pairwise."""
    if COUNT == 1:
        return x
    else:
        even, odd = neighbours(x, ROWS, B)
        return tree_sum(even + odd, ROWS // 2, B, COUNT // 2)


@triton.jit
def sum_squares(x, ROWS: tl.constexpr, B: tl.constexpr, COUNT: tl.constexpr):
    """The same of ``x * x``."""
    even, odd = neighbours(x, ROWS, B)
    return tree_sum(tl.fma(even, even, odd * odd), ROWS // 2, B, COUNT // 2)
