"""The loop over the inputs for tokens that stand anywhere; as :mod:`specdec_kernels.projection.mainloop`."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from ..projection.mainloop import last_loads


@triton.jit
def accumulate(
    w,
    x,
    there,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    B: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    EVICT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Weight rows times tokens, ``[ROWS, B]``, summed over the inputs in their order.

    Args:
        w: ``[ROWS, 1]``, where each weight row begins.
        x: ``[1, B]``, where each token begins.
        there: ``[B]``, which tokens there are.
    """
    k0 = tl.arange(0, BK)
    a = tl.zeros((ROWS, B), tl.float32)
    LAST: tl.constexpr = last_loads(K, BK, STAGES)
    for k in tl.range(0, K, BK, num_stages=STAGES):
        if K % BK == 0:
            weight = tl.load(w + (k + k0)[None, :], eviction_policy=EVICT)
            tokens = tl.load(x + (k + k0)[:, None], mask=there[None, :], other=0.0)
        else:
            inside = k + k0 < K
            weight = tl.load(w + (k + k0)[None, :], mask=inside[None, :], other=0.0, eviction_policy=EVICT)
            tokens = tl.load(x + (k + k0)[:, None], mask=there[None, :] & inside[:, None], other=0.0)
        a = tl.dot(weight, tokens, a, input_precision="ieee")
        if PDL:  # noqa: SIM102  one is known when it is compiled
            if k == LAST:
                cuda.gdc_launch_dependents()
    return a
