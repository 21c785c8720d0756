"""The module in the form that is trained: the same function as ``module.MtpModule``, over packed rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from specdec_train.blocks import DecoderLayer, Entries, RMSNorm, Rotation, Rows, linear, shape_like
from specdec_train.distilled import BorrowsOutput
from specdec_train.recipe import Batch, Checkpoint, TrainingTarget
from specdec_train.unrolled import Unrolled

from .recipe import MtpTrainingOptions

#: Of a module that is published, its tensors' names begin so.
_PREFIX = "model.mtp_layers.0."


class MtpTrainee(BorrowsOutput, Unrolled):
    """MiMo's layout; embeddings and output layer are the target's, and so are all sizes but the MLP's."""

    def __init__(self, options: MtpTrainingOptions, target: TrainingTarget) -> None:
        super().__init__(
            target,
            shape_like(target, intermediate_size=options.intermediate_size),
            passes=options.unrolled,
            decay=options.decay,
            vocab_size=options.loss_vocab_size,
        )
        hidden, eps = self.shape.hidden_size, self.shape.rms_norm_eps
        self.token_layernorm = RMSNorm(hidden, eps)
        self.hidden_layernorm = RMSNorm(hidden, eps)
        self.input_proj = linear(2 * hidden, hidden)
        self.layer = DecoderLayer(self.shape)
        self.final_layernorm = RMSNorm(hidden, eps)
        with torch.no_grad():
            self.input_proj.weight[:, :hidden] += 0.5 * torch.eye(hidden)  # states change little by a token
            self.final_layernorm.weight.copy_(target.norm)
        self.to(target.device)

    def fuse(self, batch: Batch) -> torch.Tensor:
        return batch.features["final"]

    def step(
        self,
        embedded: torch.Tensor,
        feature: torch.Tensor,
        rotation: Rotation,
        rows: Rows,
        before: Sequence[Entries],
    ) -> tuple[torch.Tensor, torch.Tensor, Entries]:
        parts = self.hidden_layernorm(feature.to(embedded.dtype)), self.token_layernorm(embedded)
        stream, entries = self.layer(self.input_proj(torch.cat(parts, -1)), rotation, rows, before)
        states = self.final_layernorm(stream)
        return states, states, entries

    def checkpoint(self) -> Checkpoint:
        tensors = {
            _PREFIX + name.removeprefix("layer."): tensor for name, tensor in self.state_dict().items()
        }
        return Checkpoint(
            config={**self.target.info.config, "num_nextn_predict_layers": 1},
            tensors=tensors,
        )
