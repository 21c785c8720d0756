"""The heads in the form that is trained: the same functions as ``head.EagleHead``, over packed rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from specdec_train.blocks import DecoderLayer, Entries, RMSNorm, Rotation, Rows, linear, shape_like
from specdec_train.distilled import BorrowsOutput
from specdec_train.recipe import Batch, Checkpoint, TrainingTarget
from specdec_train.unrolled import Unrolled
from specdec_train.vocabulary import coverage, vocabulary_maps
from torch.nn import functional

from .recipe import Eagle3TrainingOptions, EagleOptions, EagleTrainingOptions


class _Head(Unrolled):
    """What both heads share."""

    def __init__(self, options: EagleOptions, target: TrainingTarget, vocab_size: int | None) -> None:
        shape = shape_like(
            target,
            intermediate_size=options.intermediate_size,
            num_heads=options.num_heads,
            num_kv_heads=options.num_kv_heads,
        )
        super().__init__(target, shape, passes=options.unrolled, decay=options.decay, vocab_size=vocab_size)
        self.options = options

    def config(self, **more: Any) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            **self.shape.config(num_hidden_layers=1, vocab_size=self.target.info.vocab_size, bias=False),
            "tie_word_embeddings": False,
            **more,
        }


class EagleTrainee(BorrowsOutput, _Head):
    """EAGLE (arXiv 2401.15077); embeddings and output layer are the target's."""

    options: EagleTrainingOptions

    def __init__(self, options: EagleTrainingOptions, target: TrainingTarget) -> None:
        super().__init__(options, target, options.loss_vocab_size)
        hidden = self.shape.hidden_size
        self.fc = linear(2 * hidden, hidden)
        self.layers = torch.nn.ModuleList([DecoderLayer(self.shape, input_norm=False)])
        with torch.no_grad():  # what it imitates changes little from token to token
            self.fc.weight[:, hidden:] += 0.5 * torch.eye(hidden)
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
        joined = self.fc(torch.cat((embedded, feature.to(embedded.dtype)), -1))
        feature, entries = self.layers[0](joined, rotation, rows, before)
        return feature, feature, entries

    def feature_loss(
        self, feature: torch.Tensor, final: torch.Tensor, counted: torch.Tensor
    ) -> torch.Tensor | float:
        distance = functional.smooth_l1_loss(feature.float(), final.float(), reduction="none").mean(-1)
        return self.options.feature_weight * (distance * counted).sum() / counted.sum().clamp(min=1)

    def checkpoint(self) -> Checkpoint:
        return Checkpoint(config=self.config(), tensors=self.state_dict())


class Eagle3Trainee(_Head):
    """EAGLE-3; its output layer begins as the target's rows, or stays what they are."""

    options: Eagle3TrainingOptions

    def __init__(self, options: Eagle3TrainingOptions, target: TrainingTarget) -> None:
        super().__init__(options, target, options.draft_vocab_size)
        hidden, eps = self.shape.hidden_size, self.shape.rms_norm_eps
        self._boundaries = options.boundaries(target.info)
        sources = len(self._boundaries)
        self.fc = linear(sources * hidden, hidden)
        self.fc_norm = torch.nn.ModuleList(RMSNorm(hidden, eps) for _ in range(sources * options.fc_norm))
        self.midlayer = DecoderLayer(self.shape, inputs=2 * hidden)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.norm = RMSNorm(hidden, eps)
        rows = target.lm_head if self.vocabulary is None else target.lm_head[self.vocabulary]
        if options.own_head:
            self.lm_head = torch.nn.Parameter(rows.detach().float().clone())
        else:
            self._heads = [rows.detach()]  # in a list: it is no part of the module
        with torch.no_grad():
            self.norm.weight.copy_(target.norm)
        self.to(target.device)

    def fuse(self, batch: Batch) -> torch.Tensor:
        taps = [batch.features[boundary] for boundary in self._boundaries]
        if self.fc_norm:
            taps = [norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)]
        return self.fc(torch.cat(taps, -1))

    def step(
        self,
        embedded: torch.Tensor,
        feature: torch.Tensor,
        rotation: Rotation,
        rows: Rows,
        before: Sequence[Entries],
    ) -> tuple[torch.Tensor, torch.Tensor, Entries]:
        layer = self.midlayer
        assert layer.input_layernorm is not None
        hidden = self.hidden_norm(feature)
        residual = hidden if self.options.norm_before_residual else feature
        inputs = torch.cat((layer.input_layernorm(embedded), hidden.to(embedded.dtype)), -1)
        attended, entries = layer.self_attn(inputs, rotation, rows, before)
        feature = layer.close(residual + attended)
        return feature, self.norm(feature), entries

    def output(self) -> torch.Tensor:
        return self.lm_head if self.options.own_head else self._heads[0]

    def checkpoint(self) -> Checkpoint:
        vocab = self.target.info.vocab_size
        tensors = {
            name.replace("hidden_norm.", "midlayer.hidden_norm.", 1): tensor
            for name, tensor in self.state_dict().items()
        }
        if self.options.own_head:
            tensors["lm_head.weight"] = tensors.pop("lm_head")
        facts: dict[str, Any] = {}
        fields: dict[str, Any] = {
            "draft_vocab_size": vocab,
            "eagle_aux_hidden_state_layer_ids": list(self._boundaries),
            "norm_before_residual": self.options.norm_before_residual,
        }
        if self.vocabulary is not None:
            tensors |= vocabulary_maps(self.vocabulary, vocab)
            fields["draft_vocab_size"] = len(self.vocabulary)
            facts["draft_vocabulary_coverage"] = coverage(self.target.counts, self.vocabulary)
        if self.options.fc_norm:
            fields["fc_norm"] = True
        return Checkpoint(config=self.config(**fields), tensors=tensors, facts=facts)
