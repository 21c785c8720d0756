"""Medusa-like heads (arXiv 2401.10774): the last hidden state, a fixed tree, no tokens read and no KV."""

from __future__ import annotations

import torch

from ...contract import LM_HEAD, Drafts, Proposer, StepView, TargetHandle
from .config import MedusaConfig
from .trees import FixedTree


class MedusaProposer(Proposer):
    """Head ``i`` guesses the token ``i + 1`` places behind the one the target's own head gave."""

    def __init__(self, config: MedusaConfig) -> None:
        self._seed = config.seed
        self._topology = config.topology

    def load(self, target: TargetHandle) -> None:
        hidden, levels = target.info.hidden_size, self._topology.depth
        self._tree = FixedTree(self._topology, target.device)
        generator = torch.Generator().manual_seed(self._seed)
        heads = torch.randn(levels, hidden, hidden, generator=generator) / hidden**0.5
        self._heads = heads.to(device=target.device, dtype=target.dtype)
        self._lm_head = target.modules[LM_HEAD]

    def propose(self, step: StepView, out: Drafts) -> None:
        hidden = step.taps[0][step.last]
        states = hidden + torch.nn.functional.silu(hidden @ self._heads)  # [levels, B, H]
        best = [self._lm_head(state).topk(self._tree.fanout).indices for state in states]
        for node, (depth, rank) in enumerate(zip(self._topology.depths, self._topology.ranks, strict=True)):
            out.ids[:, node] = best[depth - 1][:, rank]
        out.parents[:] = self._tree.parents
        out.lens[:] = torch.minimum(step.budget, self._tree.lens_within(step.room))
