"""A drafter that samples from a law of its own and tells it: what rules that weigh probabilities want."""

from __future__ import annotations

import torch

from ...contract import Drafts, Proposer, StepView, TargetHandle
from ..tiny import table_logits
from .config import SamplerConfig
from .trees import FixedTree


class SamplerProposer(Proposer):
    """Drafts for a table checkpoint, by another table: ``near`` times the target's logits, and random ones.

    Siblings are drawn without replacement, or independently of each other; the topology is fixed
    before anything is drawn, as the contract wants it.
    """

    def __init__(self, config: SamplerConfig, path: str) -> None:
        self._config = config
        self._path = path
        self._topology = config.topology

    def load(self, target: TargetHandle) -> None:
        config = self._config
        self._tree = FixedTree(self._topology, target.device)
        logits = table_logits(self._path)
        noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(config.seed))
        self._table = (config.near * logits + config.spread * noise).to(target.device)
        self._generator = torch.Generator(target.device).manual_seed(config.seed)

    def propose(self, step: StepView, out: Drafts) -> None:
        tree, committed = self._topology, step.committed_len
        rows = torch.arange(len(committed), device=committed.device)
        for parent in (-1, *range(len(tree))):
            children = [node for node in range(len(tree)) if tree.parents[node] == parent]
            if not children:
                continue
            last = step.last_token if parent < 0 else out.ids[:, parent]
            depth = 0 if parent < 0 else tree.depths[parent]
            ids, laws = self._draw(step, self._table[last], rows, committed + depth, len(children))
            out.ids[:, children] = ids
            if out.probs is not None:
                out.probs[:, children] = laws
        out.parents[:] = self._tree.parents
        out.lens[:] = torch.minimum(step.budget, self._tree.lens_within(step.room))
        if self._config.lie is not None and out.probs is not None:
            self._lie(out)

    def _draw(
        self, step: StepView, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``[B, count]`` siblings and their laws ``[B, count, V]``."""
        ids, _ = step.sample(logits, rows, positions, count)
        if self._config.tells == "nothing":
            return ids, None
        laws = step.probs(logits, rows, positions, ids)
        if self._config.lie == "argmax":
            ids = laws[:, :1].argmax(-1).expand(-1, count)
        elif self._config.siblings == "independent":
            laws = laws[:, :1].expand(-1, count, -1)
            ids = torch.multinomial(laws[:, 0], count, replacement=True, generator=self._generator)
        return ids, laws

    def _lie(self, out: Drafts) -> None:
        """Spoil what is told of the last node of each row."""
        last = len(self._topology) - 1
        probs = out.probs[:, last]
        if self._config.lie == "zero":
            probs.scatter_(-1, out.ids[:, last, None], 0.0)
            probs /= probs.sum(-1, keepdim=True).clamp(min=1e-9)
        elif self._config.lie == "sum":
            probs *= 1.01
        elif self._config.lie == "negative":
            spare = (out.ids[:, last, None] + 1) % probs.shape[-1]
            probs.scatter_add_(-1, spare, torch.full_like(probs[:, :1], -2.0))
            probs.scatter_add_(-1, out.ids[:, last, None], torch.full_like(probs[:, :1], 2.0))
        elif self._config.lie == "nan":
            probs[:] = torch.nan
