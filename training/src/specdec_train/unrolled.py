"""Drafters that feed on what they made themselves, trained by unrolling their drafts.

Row place ``t`` stands for the draft that begins behind token ``t``. Pass 0 is the feed: token ``t`` with the
target's state at ``t - 1`` gives the law of token ``t + 1``. Pass ``s`` takes the text's token ``t + s`` and
the feature that pass ``s - 1`` made at ``t``, and sees the true entries up to ``t`` and its own draft's
behind: what the drafter meets when the engine drafts (EAGLE-3's training-time test; HASS, arXiv 2408.15766).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from .blocks import Entries, LayerShape, Rope, Rotation, Rows
from .losses import soft_cross_entropy
from .recipe import Batch, TrainingTarget
from .vocabulary import frequent_ids

#: A draft may run so far behind the longest text.
_SLACK = 64


def shape_like(
    target: TrainingTarget,
    *,
    intermediate_size: int | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
) -> LayerShape:
    """A layer of the target's sizes, but for what is said."""
    info, config = target.info, target.info.config
    rope = dict(config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)})
    rope.setdefault("rope_type", "default")
    return LayerShape(
        hidden_size=info.hidden_size,
        intermediate_size=intermediate_size or config["intermediate_size"],
        num_heads=num_heads or info.num_heads,
        num_kv_heads=num_kv_heads or num_heads or info.num_kv_heads,
        head_dim=info.head_dim,
        rms_norm_eps=target.rms_norm_eps,
        hidden_act=config.get("hidden_act", "silu"),
        rope=rope,
        max_positions=config["max_position_embeddings"],
    )


class Unrolled(torch.nn.Module):
    """The passes of a draft and their losses: a :class:`~specdec_train.recipe.Trainee` but its checkpoint.

    Args:
        shape: of the layer, for its rotary positions.
        passes: that training unrolls.
        decay: weight of each pass by that of the one before.
        vocab_size: tokens that the law is over, the most frequent ones; None: all.

    Attributes:
        vocabulary: ``[Vd]`` int64, their ids; None: all.
    """

    vocabulary: torch.Tensor | None

    def __init__(
        self,
        target: TrainingTarget,
        shape: LayerShape,
        *,
        passes: int,
        decay: float,
        vocab_size: int | None = None,
    ) -> None:
        super().__init__()
        self.target, self.shape = target, shape
        self._passes, self._decay = passes, decay
        self.rope = Rope(shape.rope_config, target.info.max_model_len + _SLACK, target.device)
        self.vocabulary, self._known = None, None
        if vocab_size is not None and vocab_size < target.info.vocab_size:
            ids = frequent_ids(target.counts, vocab_size)
            known = torch.zeros(target.info.vocab_size, dtype=torch.bool)
            known[ids] = True
            self.vocabulary, self._known = ids.to(target.device), known.to(target.device)

    # -- of a kind of drafter -------------------------------------------------------------------
    def fuse(self, batch: Batch) -> torch.Tensor:
        """The feature of each token's states, ``[B, T, H]``."""
        raise NotImplementedError

    def step(
        self,
        embedded: torch.Tensor,
        feature: torch.Tensor,
        rotation: Rotation,
        rows: Rows,
        before: Sequence[Entries],
    ) -> tuple[torch.Tensor, torch.Tensor, Entries]:
        """One pass: each place's next feature, what the output layer takes, and the entries of attention."""
        raise NotImplementedError

    def output(self) -> torch.Tensor:
        """``[Vd, H]``, the output layer over ``vocabulary``."""
        raise NotImplementedError

    def feature_loss(
        self, feature: torch.Tensor, final: torch.Tensor, counted: torch.Tensor
    ) -> torch.Tensor | float:
        """A mean over the counted places of how far features are from the target's states, if they should be
        those."""
        return 0.0

    # -- shared ---------------------------------------------------------------------------------
    def passes(self, batch: Batch, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Of each pass the features and the states ``[B, T, H]``."""
        feature = batch.later(self.fuse(batch), -1)
        rows = Rows.causal(batch.documents, batch.same(-1))
        before: list[Entries] = []
        for number in range(count):
            embedded = self.target.embed[batch.later(batch.ids, number)]
            rotation = self.rope((batch.positions + number - 1).clamp(min=0))
            feature, states, entries = self.step(embedded, feature, rotation, rows, before)
            before.append(entries)
            yield feature, states

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
