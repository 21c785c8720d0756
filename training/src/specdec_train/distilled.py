"""Drafters that are taught the target's law, draft by draft.

Row place ``t`` stands for the draft that begins behind token ``t``: a drafter there has the target's states
up to ``t - 1``. Pass ``s`` gives the law of token ``t + s + 1``, provided that the drafts before it were
right. How a pass comes about is the drafter's: from what the pass before made
(:mod:`specdec_train.unrolled`), or each on its own, as Medusa's heads.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from .losses import soft_cross_entropy
from .recipe import Batch, TrainingTarget
from .vocabulary import frequent_ids


class DistilledDrafter(torch.nn.Module, abc.ABC):
    """Passes, their losses and drafts: a :class:`~specdec_train.recipe.Trainee` but its checkpoint.

    Args:
        passes: that training teaches, at least 1.
        decay: weight of each pass by that of the one before.
        vocab_size: tokens that the law is over, the most frequent ones; None: all.

    Attributes:
        vocabulary: ``[Vd]`` int64, their ids; None: all.
    """

    vocabulary: torch.Tensor | None

    def __init__(
        self, target: TrainingTarget, *, passes: int, decay: float, vocab_size: int | None = None
    ) -> None:
        super().__init__()
        self.target = target
        self._passes, self._decay = passes, decay
        self.vocabulary, self._known = None, None
        if vocab_size is not None and vocab_size < target.info.vocab_size:
            ids = frequent_ids(target.counts, vocab_size)
            known = torch.zeros(target.info.vocab_size, dtype=torch.bool)
            known[ids] = True
            self.vocabulary, self._known = ids.to(target.device), known.to(target.device)

    # -- of a kind of drafter -------------------------------------------------------------------
    @abc.abstractmethod
    def passes(self, batch: Batch, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Of at most ``count`` passes each one's feature and what the output layer takes, ``[B, T, H]``."""

    @abc.abstractmethod
    def output(self) -> torch.Tensor:
        """``[Vd, H]``, the output layer over ``vocabulary``."""

    def feature_loss(
        self, feature: torch.Tensor, final: torch.Tensor, counted: torch.Tensor
    ) -> torch.Tensor | float:
        """A mean over the counted places of how far features are from the target's states, if they should be
        those."""
        return 0.0

    # -- shared ---------------------------------------------------------------------------------
    def loss(self, batch: Batch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        final = batch.features["final"]
        with torch.no_grad():
            laws = self.target.logits(final, self.vocabulary).flatten(0, 1)
        places = torch.arange(batch.ids.numel(), device=batch.ids.device).view_as(batch.ids)
        began = batch.same(-1)
        total = torch.zeros((), device=batch.ids.device)
        terms: dict[str, torch.Tensor] = {}
        weight, sum_of_weights = 1.0, 0.0
        for number, (feature, states) in enumerate(self.passes(batch, self._passes)):
            counted = began & batch.wanted(number + 1)
            taught = counted
            if self._known is not None:
                taught = counted & self._known[batch.later(batch.ids, number + 1)]
            share = taught.flatten().float() / taught.sum().clamp(min=1)
            loss, agree = soft_cross_entropy(
                states.flatten(0, 1), self.output(), laws, batch.later(places, number).flatten(), share
            )
            loss = loss + self.feature_loss(feature, batch.later(final, number), counted)
            total = total + weight * loss
            # A token that cannot be drafted is never agreed on.
            terms[f"agree_{number}"] = (agree & taught.flatten()).sum() / counted.sum().clamp(min=1)
            sum_of_weights += weight
            weight *= self._decay
        return total / sum_of_weights, terms

    def drafts(self, batch: Batch, depth: int) -> torch.Tensor:
        output = self.output().to(self.target.dtype)
        chosen = []
        for _, states in self.passes(batch, depth):
            best = (states.to(output.dtype) @ output.T).argmax(-1)
            chosen.append(best if self.vocabulary is None else self.vocabulary[best])
        return torch.stack(chosen, -1)


class BorrowsOutput(DistilledDrafter):
    """The output layer is the target's, frozen: the loss looks at ``vocabulary``, drafts at all tokens."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        head, ids = self.target.lm_head, self.vocabulary
        self._output = (head if ids is None else head[ids]).detach()

    def output(self) -> torch.Tensor:
        return self._output

    def drafts(self, batch: Batch, depth: int) -> torch.Tensor:
        head = self.target.lm_head
        return torch.stack(
            [(states.to(head.dtype) @ head.T).argmax(-1) for _, states in self.passes(batch, depth)], -1
        )
