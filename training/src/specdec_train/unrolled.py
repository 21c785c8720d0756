"""Drafters that feed on what they made themselves, trained by unrolling their drafts.

Pass 0 is the feed: token ``t`` with the target's state at ``t - 1`` gives the law of token ``t + 1``. Pass
``s`` takes the text's token ``t + s`` and the feature that pass ``s - 1`` made at ``t``, and sees the true
entries up to ``t`` and its own draft's behind: what the drafter meets when the engine drafts (EAGLE-3's
training-time test; HASS, arXiv 2408.15766).
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence

import torch

from .blocks import Entries, LayerShape, Rope, Rotation, Rows
from .distilled import DistilledDrafter
from .recipe import Batch, TrainingTarget

#: A draft may run so far behind the longest text.
_SLACK = 64


class Unrolled(DistilledDrafter):
    """A layer that is applied to its own output.

    Args:
        shape: of the layer, for its rotary positions.
        passes, decay, vocab_size: as for :class:`~specdec_train.distilled.DistilledDrafter`.
    """

    def __init__(
        self,
        target: TrainingTarget,
        shape: LayerShape,
        *,
        passes: int,
        decay: float,
        vocab_size: int | None = None,
    ) -> None:
        super().__init__(target, passes=passes, decay=decay, vocab_size=vocab_size)
        self.shape = shape
        self.rope = Rope(shape.rope_config, target.info.max_model_len + _SLACK, target.device)

    # -- of a kind of drafter -------------------------------------------------------------------
    @abc.abstractmethod
    def fuse(self, batch: Batch) -> torch.Tensor:
        """The feature of each token's states, ``[B, T, H]``."""

    @abc.abstractmethod
    def step(
        self,
        embedded: torch.Tensor,
        feature: torch.Tensor,
        rotation: Rotation,
        rows: Rows,
        before: Sequence[Entries],
    ) -> tuple[torch.Tensor, torch.Tensor, Entries]:
        """One pass: each place's next feature, what the output layer takes, and the entries of attention."""

    # -- shared ---------------------------------------------------------------------------------
    def passes(self, batch: Batch, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        feature = batch.later(self.fuse(batch), -1)
        rows = Rows.causal(batch.documents, batch.same(-1))
        before: list[Entries] = []
        for number in range(count):
            embedded = self.target.embed[batch.later(batch.ids, number)]
            rotation = self.rope((batch.positions + number - 1).clamp(min=0))
            feature, states, entries = self.step(embedded, feature, rotation, rows, before)
            before.append(entries)
            yield feature, states
