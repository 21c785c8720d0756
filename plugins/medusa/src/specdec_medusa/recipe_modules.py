"""The heads in the form that is trained: the same function as ``heads.MedusaHeads``, over packed rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from specdec_train.distilled import BorrowsOutput
from specdec_train.recipe import Batch, Checkpoint, TrainingTarget
from torch.nn import functional

from .choices import search_tree
from .publish import published
from .recipe import MedusaTrainingOptions

#: Ranks of a head whose accuracy is measured: as many children as a node of a searched tree can have.
_RANKS = 10


class MedusaTrainee(BorrowsOutput):
    """Heads that begin as the target's own next guess: their layers add nothing at first.

    While drafts are evaluated it counts how often each rank of each head is right, by which a tree is
    searched for; what was counted before the last step of training is forgotten.
    """

    def __init__(self, options: MedusaTrainingOptions, target: TrainingTarget) -> None:
        super().__init__(
            target, passes=options.num_heads, decay=options.decay, vocab_size=options.loss_vocab_size
        )
        hidden, heads, layers = target.info.hidden_size, options.num_heads, options.num_layers
        self.options = options
        self.weights = torch.nn.ParameterList(torch.zeros(heads, hidden, hidden) for _ in range(layers))
        self.biases = torch.nn.ParameterList(torch.zeros(heads, hidden) for _ in range(layers))
        self._hits = torch.zeros(heads, _RANKS, device=target.device)
        self._drafted = torch.zeros(heads, device=target.device)
        self.to(target.device)

    def states(self, hidden: torch.Tensor, head: int) -> torch.Tensor:
        """``[..., H]``, the target's state -> what the output layer of a head reads."""
        for weight, bias in zip(self.weights, self.biases, strict=True):
            hidden = hidden + functional.silu(functional.linear(hidden, weight[head], bias[head]))
        return hidden

    def passes(self, batch: Batch, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        before = batch.later(batch.features["final"], -1)  # the state whose logits gave each token
        for head in range(min(count, self.options.num_heads)):
            states = self.states(before, head)
            yield states, states

    def loss(self, batch: Batch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        self._hits.zero_()
        self._drafted.zero_()
        return super().loss(batch)

    def drafts(self, batch: Batch, depth: int) -> torch.Tensor:
        best = []
        head = self.target.lm_head
        for number, (_, states) in enumerate(self.passes(batch, depth)):
            ranked = (states.to(head.dtype) @ head.T).topk(_RANKS, dim=-1).indices
            there = batch.wanted(number + 1) & batch.same(-1)
            right = (ranked == batch.later(batch.ids, number + 1)[..., None]) & there[..., None]
            self._hits[number] += right.sum((0, 1))
            self._drafted[number] += there.sum()
            best.append(ranked[..., 0])
        return torch.stack(best, -1)

    def accuracies(self) -> list[list[float]]:
        """By head and rank, the share of held-out tokens that were right."""
        shares = self._hits.double() / self._drafted.double().clamp(min=1)[:, None]
        return shares.tolist()

    def checkpoint(self) -> Checkpoint:
        weights = {}
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            for head in range(self.options.num_heads):
                weights[f"blocks.{head}.{layer}.weight"] = weight[head].detach()
                weights[f"blocks.{head}.{layer}.bias"] = bias[head].detach()
        nodes = self.options.search_tree
        config, tensors = published(
            "head-only",
            weights,
            vocab_size=self.target.info.vocab_size,
            choices=None if nodes is None else search_tree(self.accuracies(), nodes) or [(0,)],
        )
        return Checkpoint(config=config, tensors=tensors)
