"""The speculator in the form that is trained: the same function as ``speculator.MlpSpeculator``."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from specdec_train.distilled import DistilledDrafter
from specdec_train.recipe import Batch, Checkpoint, TrainingTarget
from torch.nn import functional

from .publish import published
from .recipe import MlpSpeculatorTrainingOptions
from .speculator import embedding_scale, normalize


class MlpSpeculatorTrainee(DistilledDrafter):
    """Steps share embeddings, output layer and norm; the first has a projection of its own."""

    def __init__(self, options: MlpSpeculatorTrainingOptions, target: TrainingTarget) -> None:
        super().__init__(target, passes=options.n_predict, decay=options.decay)
        hidden, vocab = target.info.hidden_size, target.info.vocab_size
        size = options.inner_dim or hidden
        self.options = options
        std = size**-0.5

        def weight(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(shape) * std)

        self.emb, self.head = weight(vocab, size), weight(vocab, size)
        self.first = weight(size, hidden)
        self.later_steps = weight(size, size) if options.n_predict > 1 else None
        self.gain = torch.nn.Parameter(torch.ones(size))
        self.shift = torch.nn.Parameter(torch.zeros(size))
        self._scale = embedding_scale(options.n_predict, size)
        self.to(target.device)

    def passes(self, batch: Batch, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        state = batch.later(batch.features["final"], -1)  # the state whose logits gave each token
        if self.options.scale_input:
            state = normalize(state) / math.sqrt(2)
        for step in range(min(count, self.options.n_predict)):
            weight = self.first if not step or self.later_steps is None else self.later_steps
            last = self.emb[batch.later(batch.ids, step)]
            mixed = functional.linear(state.to(last.dtype), weight).to(last.dtype) + self._scale * last
            state = functional.gelu(self.gain * normalize(mixed) + self.shift)
            yield state, state

    def output(self) -> torch.Tensor:
        return self.head

    def checkpoint(self) -> Checkpoint:
        weights = {
            "emb.0.weight": self.emb,
            "head.0.weight": self.head,
            "proj.0.weight": self.first,
            "ln.0.weight": self.gain,
            "ln.0.bias": self.shift,
        }
        if self.later_steps is not None:
            weights["proj.1.weight"] = self.later_steps
        config, tensors = published(
            {name: weight.detach() for name, weight in weights.items()},
            n_predict=self.options.n_predict,
            tied=True,
            scale_input=self.options.scale_input,
        )
        return Checkpoint(config=config, tensors=tensors)
