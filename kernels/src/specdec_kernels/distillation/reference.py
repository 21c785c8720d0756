"""Distillation in torch; it keeps several float32 copies of the logits."""

from __future__ import annotations

import torch


def distill_(
    logits: torch.Tensor, target_logits: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    own, wanted = logits.float(), target_logits[rows].float()
    agree = own.argmax(-1) == wanted.argmax(-1)
    law = wanted.softmax(-1)
    log_q = own.log_softmax(-1)
    losses = -(law * log_q).sum(-1) * weights
    logits.copy_(log_q.exp_().sub_(law).mul_(weights[:, None]))
    return losses, agree
