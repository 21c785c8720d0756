"""The draft model in the form that is trained: a Llama of the target's tokenizer, over packed rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from specdec_train.blocks import DecoderLayer, LayerShape, RMSNorm, Rope, Rows, shape_like
from specdec_train.losses import soft_cross_entropy
from specdec_train.recipe import Batch, Checkpoint, TrainingTarget
from specdec_train.vocabulary import frequent_ids
from torch.nn import functional

from .recipe import DraftTrainingOptions

_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def shape_of(options: DraftTrainingOptions, target: TrainingTarget) -> LayerShape:
    """Sizes of a layer; those that are not said keep the target's proportions."""
    like = shape_like(target, intermediate_size=options.intermediate_size)
    hidden = options.hidden_size or like.hidden_size
    heads = options.num_heads or hidden // like.head_dim
    kv_heads = options.num_kv_heads
    if kv_heads is None:
        kv_heads = max(count for count in range(1, like.num_kv_heads + 1) if heads % count == 0)
    intermediate = options.intermediate_size or like.intermediate_size * hidden // like.hidden_size
    return attrs.evolve(
        like, hidden_size=hidden, num_heads=heads, num_kv_heads=kv_heads, intermediate_size=intermediate
    )


class DraftTrainee(torch.nn.Module):
    """Tied to its embeddings if the target is, or if it is narrower than the target.

    A layer begins as one of the target's where names and shapes agree; embeddings, final norm and output
    layer likewise. Narrower embeddings begin as the target's along their principal directions.
    """

    def __init__(self, options: DraftTrainingOptions, target: TrainingTarget) -> None:
        super().__init__()
        self.options, self.target = options, target
        self.shape = shape_of(options, target)
        hidden, eps = self.shape.hidden_size, self.shape.rms_norm_eps
        same = hidden == target.embed.shape[1]
        self.embed_tokens = torch.nn.Parameter(_narrowed(target.embed, hidden))
        self.layers = torch.nn.ModuleList(DecoderLayer(self.shape) for _ in range(options.num_layers))
        self.norm = RMSNorm(hidden, eps)
        self.tied = not same or target.lm_head is target.embed
        self.lm_head = None if self.tied else torch.nn.Parameter(target.lm_head.detach().float().clone())
        if same:
            with torch.no_grad():
                self.norm.weight.copy_(target.norm)
        self._begin_as(options.sources(target.info))
        self.rope = Rope(self.shape.rope_config, target.info.max_model_len, target.device)
        self._looked_at = None
        if options.loss_vocab_size is not None and options.loss_vocab_size < target.info.vocab_size:
            self._looked_at = frequent_ids(target.counts, options.loss_vocab_size).to(target.device)
        self.to(target.device)

    def _begin_as(self, sources: tuple[int, ...]) -> None:
        """Copy the layers ``sources`` of the target, but for those that are made otherwise."""
        stored: dict[int, dict[str, torch.Tensor]] = {layer: {} for layer in sources}
        for name, tensor in self.target.load_weights():
            parts = name.removeprefix("model.").split(".", 2)
            if parts[0] == "layers" and int(parts[1]) in stored:
                stored[int(parts[1])][parts[2]] = tensor
        for layer, source in zip(self.layers, sources, strict=True):
            mine = {name: weight.shape for name, weight in layer.state_dict().items()}
            if mine == {name: tensor.shape for name, tensor in stored[source].items()}:
                layer.load_state_dict(stored[source])

    def states(self, batch: Batch) -> torch.Tensor:
        """``[B, T, H]`` after the final norm."""
        rows, rotation = Rows.causal(batch.documents), self.rope(batch.positions)
        x = functional.embedding(batch.ids, self.embed_tokens)
        for layer in self.layers:
            x, _ = layer(x, rotation, rows)
        return self.norm(x)

    def output(self) -> torch.Tensor:
        """``[V, H]``."""
        return self.embed_tokens if self.lm_head is None else self.lm_head

    def loss(self, batch: Batch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        counted = batch.wanted(1)
        ids, output = self._looked_at, self.output()
        with torch.no_grad():
            laws = self.target.logits(batch.features["final"], ids).flatten(0, 1)
        share = counted.flatten().float() / counted.sum().clamp(min=1)
        loss, agree = soft_cross_entropy(
            self.states(batch).flatten(0, 1),
            output if ids is None else output[ids],
            laws,
            torch.arange(len(share), device=share.device),
            share,
        )
        return loss, {"agree_0": (agree * share).sum()}

    def drafts(self, batch: Batch, depth: int) -> torch.Tensor:
        """A draft model reads its own drafts as it reads text: what is right is what it says behind text."""
        output = self.output().to(self.target.dtype)
        best = (self.states(batch).to(output.dtype) @ output.T).argmax(-1)
        return torch.stack([batch.later(best, level) for level in range(depth)], -1)

    def checkpoint(self) -> Checkpoint:
        tensors = {f"model.{name}": tensor for name, tensor in self.state_dict().items()}
        tensors["model.embed_tokens.weight"] = tensors.pop("model.embed_tokens")
        if not self.tied:
            tensors["lm_head.weight"] = tensors.pop("model.lm_head")
        config: dict[str, Any] = {
            "architectures": ["LlamaForCausalLM"],
            **self.shape.config(num_hidden_layers=len(self.layers), vocab_size=self.target.info.vocab_size),
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": self.tied,
            **{name: self.target.info.config.get(name) for name in _SPECIAL},
        }
        return Checkpoint(config=config, tensors=tensors, copied=_TOKENIZER)


def _narrowed(embed: torch.Tensor, hidden: int) -> torch.Tensor:
    """``[V, H]`` -> ``[V, hidden]`` float32, along the directions in which it varies most; wider: noise."""
    wide = embed.detach().float()
    if hidden == wide.shape[1]:
        return wide.clone()
    if hidden > wide.shape[1]:
        return torch.randn(len(wide), hidden, device=wide.device) * wide.std()
    _, directions = torch.linalg.eigh(wide.T @ wide)  # ascending
    return wide @ directions[:, -hidden:]
