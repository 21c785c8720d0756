"""The head itself: hidden states and tokens to logits.

Shapes: ``T`` tokens, ``R`` rows of logits, ``H`` hidden size, ``Vd`` tokens that can be drafted.
The input of a token is its own embedding and the *feature* of the token before it: what the target's hidden
states are fused to, or in later steps of a draft what the head made of that token itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from specdec_kernels.attention import AttentionMetadata
from specdec_kernels.projection import Stream, gather, join, normalize, product, side_by_side
from specdecode.heads.layers import layer_config
from specdecode.layers import (
    ColumnParallelLinear,
    KVCache,
    QKVParallelLinear,
    RMSNorm,
    RotaryEmbedding,
    VocabEmbedding,
)
from specdecode.models import DecoderConfig, DecoderLayer, can_fuse, fused_layer, fused_write

from .spec import HeadSpec

Embed = Callable[[torch.Tensor], torch.Tensor]
LmHead = Callable[[torch.Tensor], torch.Tensor]


class EagleHead(torch.nn.Module):
    """EAGLE (arXiv 2401.15077) and EAGLE-3 (arXiv 2503.01840) heads; weights are filled in by ``loading``.

    On a GPU it computes by the target's own fused kernels: a layer is four products and one attention, and
    what stands between two layers, the gather of embeddings and two norms, one launch.

    Attributes:
        draft_ids: ``[Vd]`` int64, the target's id of each of the head's; None: column ``j`` is token ``j``.
        borrows_rows: whether ``lm_head`` is a copy of the target's rows of ``draft_ids``.

    Args:
        target_embed, target_lm_head: the target's, where the head has none of its own.
        max_model_len: positions that the rope table reaches.
    """

    draft_ids: torch.Tensor | None

    def __init__(
        self,
        spec: HeadSpec,
        *,
        target_embed: Embed | None,
        target_lm_head: LmHead | None,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.spec = spec
        hidden, sources = spec.hidden_size, len(spec.boundaries)

        def norm(name: str, size: int = hidden) -> RMSNorm | None:
            if not spec.has(f"{name}.weight"):
                return None
            return RMSNorm(size, spec.rms_norm_eps, dtype=dtype, device=device)

        def linear(name: str, inputs: int, outputs: int) -> ColumnParallelLinear | None:
            if not spec.has(f"{name}.weight"):
                return None
            bias = spec.has(f"{name}.bias")
            return ColumnParallelLinear(inputs, outputs, bias=bias, dtype=dtype, device=device)

        self.target_embed, self.target_lm_head = target_embed, target_lm_head
        self.embed_tokens: VocabEmbedding | None = None
        if spec.has("embed_tokens.weight"):
            self.embed_tokens = VocabEmbedding(spec.vocab_size, hidden, dtype=dtype, device=device)
        self.fc = linear("fc", sources * spec.target_hidden_size if spec.eagle3 else 2 * hidden, hidden)
        self.input_norm = norm("input_norm", sources * spec.target_hidden_size)
        self.fc_norm = torch.nn.ModuleList(
            RMSNorm(spec.target_hidden_size, spec.rms_norm_eps, dtype=dtype, device=device)
            for source in range(sources)
            if spec.has(f"fc_norm.{source}.weight")
        )
        self.hidden_norm = norm("layers.0.hidden_norm")
        self.embedding_layernorm = norm("embedding_layernorm")
        self.pre_lm_head_layernorm = norm("pre_lm_head_layernorm")
        self.norm = norm("norm")
        config = _layer_config(spec)
        self._config = config
        self._can_fuse = can_fuse(dtype, device)
        # A token is rotated as of the position of its feature, one before its own.
        self.rotary = RotaryEmbedding(config.rope, max_model_len, device=device)
        self.rotary.cos, self.rotary.sin = (
            torch.cat((table[:1], table)) for table in (self.rotary.cos, self.rotary.sin)
        )
        self._ones = torch.ones(hidden, dtype=dtype, device=device)  # the gain where no norm comes next
        self.layers = torch.nn.ModuleList(
            DecoderLayer(config, layer, dtype=dtype, device=device) for layer in range(spec.num_layers)
        )
        self._widen_first_layer(config, dtype, device)
        self.lm_head: ColumnParallelLinear | None = None
        if spec.lm_head_rows is not None:
            self.lm_head = ColumnParallelLinear(hidden, spec.lm_head_rows, dtype=dtype, device=device)
        self.borrows_rows = False
        ids = None if spec.draft_ids is None else torch.from_numpy(spec.draft_ids).to(device)
        self.register_buffer("draft_ids", ids, persistent=False)

    def _widen_first_layer(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        first, spec = self._layers[0], self.spec
        if not spec.has("layers.0.input_layernorm.weight"):
            first.input_layernorm = torch.nn.Identity()  # EAGLE's input is raw
        if spec.eagle3:
            first.self_attn.qkv_proj = QKVParallelLinear(
                2 * config.hidden_size,
                config.num_heads,
                config.num_kv_heads,
                config.head_dim,
                bias=config.qkv_bias,
                dtype=dtype,
                device=device,
            )

    @property
    def _layers(self) -> list[Any]:
        return list(self.layers)

    @property
    def _table(self) -> torch.Tensor | None:
        """``[V, H]``, where embedding a token is reading a row of it."""
        embed = self.embed_tokens or self.target_embed
        return embed.weight if isinstance(embed, VocabEmbedding) else None

    @property
    def fused(self) -> bool:
        """Whether it computes by fused kernels."""
        return self._can_fuse and self._table is not None

    def fuse(self, taps: Sequence[torch.Tensor]) -> torch.Tensor:
        """The feature of the target's hidden states, ``[T, Ht]`` each, as ``spec.boundaries`` has them."""
        if not self.spec.eagle3 or self.fc is None:
            return taps[0]
        if self.fc_norm:
            taps = [norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)]
        joined = side_by_side(taps)
        if self.input_norm is not None:
            joined = self.input_norm(joined)
        return self._project(self.fc, joined)

    def _project(self, linear: ColumnParallelLinear, x: torch.Tensor) -> torch.Tensor:
        return product(x, linear.weight, linear.bias) if self.fused else linear(x)

    def forward(
        self,
        ids: torch.Tensor,
        feature: torch.Tensor,
        positions: torch.Tensor,
        meta: AttentionMetadata,
        caches: Sequence[KVCache],
        *,
        rows: torch.Tensor | None = None,
        wanted: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute tokens, writing their keys and values.

        Args:
            ids: ``[T]`` int64.
            feature: ``[T, H]``, of the token before each; with ``rows`` of any number of tokens.
            positions: ``[T]`` int64, of the tokens, from 1 on.
            rows: ``[T]`` int64, which of ``feature`` belongs to each token; None: its own.
            wanted: ``[R]`` int64, of the tokens whose states are wanted; None: all. Where there are none,
                the last layer ends with its keys and values.

        Returns:
            Each token's feature ``[T, H]``, and what :meth:`logits` takes, ``[R, H]``; both ``[0, H]`` where
            nothing is wanted.
        """
        keys_only = wanted is not None and not len(wanted)
        if self.fused and len(ids):
            return self._forward_fused(ids, feature, positions, meta, caches, rows, wanted, keys_only)
        feature, states = self._forward_layers(
            ids, feature if rows is None else feature[rows], positions, meta, caches, keys_only
        )
        return feature, states if wanted is None else states[wanted]

    def _forward_layers(
        self,
        ids: torch.Tensor,
        feature: torch.Tensor,
        positions: torch.Tensor,
        meta: AttentionMetadata,
        caches: Sequence[KVCache],
        keys_only: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``keys_only``: of the last layer no more is wanted."""
        embedded, nothing = self._embed(ids), (feature[:0], feature[:0])
        rotation = self.rotary(positions)
        first, last = self._layers[0], self._layers[-1]
        if self.spec.eagle3:
            assert self.hidden_norm is not None and self.norm is not None  # no such head without them
            hidden = self.hidden_norm(feature)
            residual = hidden if self.spec.norm_before_residual else feature
            inputs = torch.cat((first.input_layernorm(embedded), hidden), dim=-1)
            if keys_only and first is last:
                first.self_attn.write(inputs, rotation, meta, caches[0])
                return nothing
            attended = first.self_attn(inputs, rotation, meta, caches[0])
            x, residual = first.post_attention_layernorm.add(attended, residual)
            x = first.mlp(x)
        else:
            assert self.fc is not None
            if self.embedding_layernorm is not None:
                embedded = self.embedding_layernorm(embedded)
            x = self.fc(torch.cat((embedded, feature), dim=-1))
            if keys_only and first is last:
                first.write(x, None, rotation, meta, caches[0])
                return nothing
            x, residual = first(x, None, rotation, meta, caches[0])
        for layer, cache in zip(self._layers[1:], caches[1:], strict=True):
            if keys_only and layer is last:
                layer.write(x, residual, rotation, meta, cache)
                return nothing
            x, residual = layer(x, residual, rotation, meta, cache)
        if self.norm is not None and self.spec.eagle3:
            states, feature = self.norm.add(x, residual)
            return (states if self.spec.norm_output else feature), states
        feature = residual + x
        if self.pre_lm_head_layernorm is not None:
            return feature, self.pre_lm_head_layernorm(feature)
        return feature, feature

    def _forward_fused(
        self,
        ids: torch.Tensor,
        feature: torch.Tensor,
        positions: torch.Tensor,
        meta: AttentionMetadata,
        caches: Sequence[KVCache],
        rows: torch.Tensor | None,
        wanted: torch.Tensor | None,
        keys_only: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layers, eps, last_norm = self._layers, self.spec.rms_norm_eps, self.norm or self.pre_lm_head_layernorm
        gains = [layer.input_layernorm.weight for layer in layers[1:]]
        gains.append(self._ones if last_norm is None else last_norm.weight)
        stream = self._enter(ids, feature, rows)
        for layer, cache, gain in zip(layers, caches, gains, strict=True):
            if keys_only and layer is layers[-1]:
                fused_write(layer, stream, self.rotary, positions, meta, cache, config=self._config)
                return feature[:0], feature[:0]
            stream = fused_layer(
                layer, stream, self.rotary, positions, meta, cache, gain, config=self._config
            )
        feature = stream.residual
        if self.spec.norm_output:
            feature = normalize(stream, gains[-1], eps)
            return feature, feature if wanted is None else gather((feature,), wanted)
        if last_norm is not None:
            return feature, normalize(stream, gains[-1], eps, wanted)
        return feature, feature if wanted is None else gather((feature,), wanted)

    def _enter(self, ids: torch.Tensor, feature: torch.Tensor, rows: torch.Tensor | None) -> Stream:
        """What the first layer takes in: all norms of its input are made."""
        spec, table, first = self.spec, self._table, self._layers[0]
        assert table is not None
        before = first.input_layernorm if spec.eagle3 else self.embedding_layernorm
        joined = join(
            ids,
            table,
            feature,
            table_gain=getattr(before, "weight", None),
            feature_gain=None if self.hidden_norm is None else self.hidden_norm.weight,
            eps=spec.rms_norm_eps,
            rows=rows,
        )
        if not spec.eagle3:
            assert self.fc is not None
            x = self._project(self.fc, joined)
            return Stream(x, first.input_layernorm(x), None)
        if spec.norm_before_residual:
            return Stream(joined[:, -spec.hidden_size :].contiguous(), joined, None)
        return Stream(feature if rows is None else gather((feature,), rows), joined, None)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """``[R, H] -> [R, Vd]``, of the tokens ``draft_ids``, or of the first ``Vd``."""
        if self.lm_head is not None:
            return self._project(self.lm_head, states)
        assert self.target_lm_head is not None
        logits = self.target_lm_head(states)
        return logits if self.draft_ids is None else logits[:, self.draft_ids]

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        if self.embed_tokens is not None:
            return self.embed_tokens(ids)
        assert self.target_embed is not None
        return self.target_embed(ids)


def _layer_config(spec: HeadSpec) -> DecoderConfig:
    return layer_config(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rms_norm_eps=spec.rms_norm_eps,
        rope=spec.rope,
        max_positions=spec.max_positions,
        hidden_act=spec.hidden_act,
        qkv_bias=spec.has("layers.0.self_attn.q_proj.bias"),
        out_bias=spec.has("layers.0.self_attn.o_proj.bias"),
        mlp_bias=spec.has("layers.0.mlp.gate_proj.bias"),
    )
