"""Losses over large vocabularies, computed in chunks so that no ``[tokens, vocabulary]`` float32 is kept."""

from __future__ import annotations

from typing import Any

import torch
from specdec_kernels.distillation import distill_

#: Logits of a chunk: 2^26 are 256 MiB in float32.
_CHUNK_ELEMENTS = 1 << 26


def soft_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target_logits: torch.Tensor,
    rows: torch.Tensor,
    weights: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy of a drafter's law against the target's; its gradient is that of their KL divergence.

    The gradients of ``hidden`` and ``weight`` are computed with the loss, chunk by chunk, so that logits are
    never stored; ``hidden @ weight.T`` are the drafter's. Products are in ``target_logits``' dtype (float32
    for float16), sums and exponentials in float32.

    Args:
        hidden: ``[N, H]``, what the output layer is applied to.
        weight: ``[V', H]``, the output layer; it may be frozen.
        target_logits: ``[M, V']``, the target's over the same (reduced) vocabulary.
        rows: ``[N]`` int64, which of them is the law wanted of each.
        weights: ``[N]`` float32; 0: does not count. The loss is the sum of weighted losses.

    Returns:
        The loss, float32, and ``[N]`` bool: whether the likeliest tokens agree.
    """
    loss, agree = _SoftCrossEntropy.apply(hidden, weight, target_logits, rows, weights)
    return loss, agree


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        target_logits: torch.Tensor,
        rows: torch.Tensor,
        weights: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = target_logits.dtype
        if dtype == torch.float16:  # slopes are too small for its exponents
            dtype = torch.float32
        count, size = hidden.shape[0], weight.shape[0]
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        output = weight.to(dtype)
        loss = torch.zeros((), device=hidden.device)
        agree = torch.empty(count, dtype=torch.bool, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros(weight.shape, device=weight.device) if wants_weight else None
        step = max(1, _CHUNK_ELEMENTS // size)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, count, step):
                part = slice(start, min(start + step, count))
                states = hidden[part].to(dtype)
                slope = states @ output.T
                losses, agree[part] = distill_(slope, target_logits, rows[part], weights[part])
                loss += losses.sum()
                if grad_hidden is not None:
                    grad_hidden[part] = (slope @ output).to(hidden.dtype)
                if grad_weight is not None:
                    grad_weight += (slope.T @ states).float()
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(agree)
        return loss, agree

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grads[0]
        return (
            None if grad_hidden is None else (grad_hidden * scale).to(grad_hidden.dtype),
            None if grad_weight is None else (grad_weight * scale).to(ctx.weight_dtype),
            None,
            None,
            None,
        )
