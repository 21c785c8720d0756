"""Medusa-like heads (arXiv 2401.10774): the last hidden state, a fixed tree, no tokens read and no KV."""

from __future__ import annotations

import torch

from ...contract import LM_HEAD, Drafts, Proposer, StepView, TargetHandle
from .config import MedusaConfig
from .trees import lens_within


class MedusaProposer(Proposer):
    """Head ``i`` guesses the token ``i + 1`` places behind the one the target's own head gave."""

    def __init__(self, config: MedusaConfig) -> None:
        self._seed = config.seed
        self._tree = config.topology

    def load(self, target: TargetHandle) -> None:
        hidden, levels = target.info.hidden_size, self._tree.depth
        generator = torch.Generator().manual_seed(self._seed)
        heads = torch.randn(levels, hidden, hidden, generator=generator) / hidden**0.5
        self._heads = heads.to(device=target.device, dtype=target.dtype)
        self._lm_head = target.modules[LM_HEAD]

    def propose(self, step: StepView, out: Drafts) -> None:
        hidden = step.taps[0][step.last]
        states = hidden + torch.nn.functional.silu(hidden @ self._heads)  # [levels, B, H]
        best = [self._lm_head(state).topk(self._tree.fanout).indices for state in states]
        for node, (depth, rank) in enumerate(zip(self._tree.depths, self._tree.ranks, strict=True)):
            out.ids[:, node] = best[depth - 1][:, rank]
        out.parents[:] = torch.tensor(self._tree.parents, device=hidden.device)
        out.lens[:] = torch.minimum(step.budget, lens_within(self._tree, step.room))
