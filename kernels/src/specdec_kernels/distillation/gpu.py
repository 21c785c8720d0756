"""Distillation in Triton, a program a row. The floor is its bytes: both logits read, the gradient written.

The second look at a row finds it in the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from ..gpu import launch

_BLOCK = 2048


def distill_(
    logits: torch.Tensor, target_logits: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    count, size = logits.shape
    losses = torch.empty(count, dtype=torch.float32, device=logits.device)
    agree = torch.empty(count, dtype=torch.bool, device=logits.device)
    if count:
        block = min(_BLOCK, triton.next_power_of_2(size))
        launch(
            _distill_kernel,
            (count,),
            logits,
            target_logits,
            rows,
            weights,
            losses,
            agree,
            size,
            BLOCK=block,
            num_warps=8,
        )
    return losses, agree


@triton.jit
def _distill_kernel(
    LOGITS, TARGET, ROWS, WEIGHTS, LOSSES, AGREE, size, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    own = LOGITS + row * size
    wanted = TARGET + tl.load(ROWS + row) * size
    weight = tl.load(WEIGHTS + row)
    own_max, own_sum, own_best = -float("inf"), 0.0, 0
    law_max, law_sum, law_best = -float("inf"), 0.0, 0
    mean = 0.0  # of the drafter's logits under the target's law, by law_sum
    for start in range(0, size, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < size
        q = tl.load(own + i, mask=inside, other=-float("inf")).to(tl.float32)
        p = tl.load(wanted + i, mask=inside, other=-float("inf")).to(tl.float32)
        q_max, q_best = tl.max(q, 0, return_indices=True)
        p_max, p_best = tl.max(p, 0, return_indices=True)
        if q_max > own_max:
            own_sum *= tl.exp(own_max - q_max)
            own_max, own_best = q_max, start + q_best
        if p_max > law_max:
            factor = tl.exp(law_max - p_max)
            law_sum *= factor
            mean *= factor
            law_max, law_best = p_max, start + p_best
        own_sum += tl.sum(tl.exp(q - own_max), 0)
        share = tl.exp(p - law_max)
        law_sum += tl.sum(share, 0)
        mean += tl.sum(share * tl.where(inside, q, 0.0), 0)
    tl.store(LOSSES + row, weight * (own_max + tl.log(own_sum) - mean / law_sum))
    tl.store(AGREE + row, own_best == law_best)
    for start in range(0, size, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < size
        q = tl.load(own + i, mask=inside, other=0.0).to(tl.float32)
        p = tl.load(wanted + i, mask=inside, other=0.0).to(tl.float32)
        slope = weight * (tl.exp(q - own_max) / own_sum - tl.exp(p - law_max) / law_sum)
        tl.store(own + i, slope, mask=inside)
