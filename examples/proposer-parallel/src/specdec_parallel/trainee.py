"""The drafter in the form that is trained: the same function as ``model.ParallelDrafter``, on packed rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from specdec_train.blocks import DecoderLayer, Entries, LayerShape, RMSNorm, Rope, Rows, linear
from specdec_train.distilled import BorrowsOutput
from specdec_train.recipe import Batch, Boundary, Checkpoint, TrainingTarget

from .checkpoint import DrafterShape
from .recipe import ParallelTrainingOptions


class ParallelTrainee(BorrowsOutput):
    """Pass 0: the fed tokens; pass ``s``: the ``s``-th mask token of the drafts that begin at each place.

    A draft's masks see the true entries up to their place and each other, in order, so one pass over a row
    trains the drafts behind all of its tokens.
    """

    def __init__(
        self, options: ParallelTrainingOptions, target: TrainingTarget, taps: tuple[Boundary, ...]
    ) -> None:
        super().__init__(
            target,
            passes=options.num_draft_tokens,
            decay=options.decay,
            vocab_size=options.loss_vocab_size,
        )
        width, hidden = target.info.hidden_size, options.hidden_size
        self.drafter = shape = DrafterShape(
            target_hidden_size=width,
            hidden_size=hidden,
            intermediate_size=options.intermediate_size,
            num_layers=options.num_layers,
            num_heads=options.num_heads,
            num_kv_heads=1,
            head_dim=hidden // options.num_heads,
            num_draft_tokens=options.num_draft_tokens,
            taps=taps,
        )
        eps = shape.rms_norm_eps
        layer = LayerShape(
            hidden_size=hidden,
            intermediate_size=shape.intermediate_size,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            rms_norm_eps=eps,
            rope=shape.rope,
            max_positions=target.info.max_model_len,
        )
        self.embed_norm = RMSNorm(width, eps)
        self.tap_norms = torch.nn.ModuleList(RMSNorm(width, eps) for _ in taps)
        self.fc = linear((1 + len(taps)) * width, hidden)
        self.mask = torch.nn.Parameter(0.02 * torch.randn(hidden))
        self.layers = torch.nn.ModuleList(DecoderLayer(layer) for _ in range(shape.num_layers))
        self.norm = RMSNorm(hidden, eps)
        self.out = linear(hidden, width)
        self._begin_along(target.lm_head)
        self.rope = Rope(
            layer.rope_config, target.info.max_model_len + options.num_draft_tokens, target.device
        )
        self.to(target.device)

    @torch.no_grad()
    def _begin_along(self, lm_head: torch.Tensor) -> None:
        """A narrow stream begins where the output layer varies most: in its principal directions."""
        rows = lm_head.float()
        _, directions = torch.linalg.eigh(rows.T @ rows)  # ascending
        count = min(directions.shape[1], self.drafter.hidden_size)
        best = directions[:, -count:]  # [H, count]
        self.out.weight[:, :count] += best
        self.fc.weight[:count, -best.shape[0] :] += best.T  # the last tap

    def passes(self, batch: Batch, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        rows = Rows.causal(batch.documents, batch.same(-1))
        before: list[list[Entries]] = [[] for _ in self.layers]
        x = self._feed(batch)
        for number in range(min(count, self.drafter.num_draft_tokens)):
            rotation = self.rope(batch.positions + number)
            for layer, entries in zip(self.layers, before, strict=True):
                x, own = layer(x, rotation, rows, entries)
                entries.append(own)
            states = self.out(self.norm(x))
            yield states, states
            x = self.mask.expand(*batch.ids.shape, -1).to(states.dtype)

    def _feed(self, batch: Batch) -> torch.Tensor:
        parts = [self.embed_norm(self.target.embed[batch.ids])]
        for norm, boundary in zip(self.tap_norms, self.drafter.taps, strict=True):
            parts.append(norm(batch.later(batch.features[boundary], -1)))
        fed: torch.Tensor = self.fc(torch.cat(parts, -1))
        return fed

    def checkpoint(self) -> Checkpoint:
        return Checkpoint(config=self.drafter.config(), tensors=self.state_dict())
