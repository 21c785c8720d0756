"""The head itself: hidden states and tokens to logits.

Shapes: ``T`` tokens, ``R`` rows of logits, ``H`` hidden size, ``V`` the target's vocabulary.
The input of a token is its own embedding and the *feature* of the token before it: what the target's hidden
states are fused to, or in later steps of a draft what the head made of that token itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from specdec_kernels.attention import AttentionMetadata
from specdecode.layers import (
    ColumnParallelLinear,
    KVCache,
    QKVParallelLinear,
    RMSNorm,
    RopeConfig,
    RotaryEmbedding,
    VocabEmbedding,
)
from specdecode.models import DecoderConfig, DecoderLayer

from .spec import HeadSpec

Embed = Callable[[torch.Tensor], torch.Tensor]
LmHead = Callable[[torch.Tensor], torch.Tensor]


class EagleHead(torch.nn.Module):
    """EAGLE (arXiv 2401.15077) and EAGLE-3 (arXiv 2503.01840) heads; weights are filled in by ``loading``.

    Attributes:
        draft_ids: ``[Vd]`` int64, the target's id of each of the head's; None: they are the same.

    Args:
        target_embed, target_lm_head: the target's, where the head has none of its own; ``lm_head`` gives
            ``[R, V]`` float32.
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
        config = _decoder_config(spec)
        self.rotary = RotaryEmbedding(config.rope, max_model_len, device=device)
        self.layers = torch.nn.ModuleList(
            DecoderLayer(config, layer, dtype=dtype, device=device) for layer in range(spec.num_layers)
        )
        self._widen_first_layer(config, dtype, device)
        self.lm_head: ColumnParallelLinear | None = None
        if spec.lm_head_rows is not None:
            self.lm_head = ColumnParallelLinear(hidden, spec.lm_head_rows, dtype=dtype, device=device)
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

    def fuse(self, taps: Sequence[torch.Tensor]) -> torch.Tensor:
        """The feature of the target's hidden states, ``[T, Ht]`` each, as ``spec.boundaries`` has them."""
        if not self.spec.eagle3 or self.fc is None:
            return taps[0]
        if self.fc_norm:
            taps = [norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)]
        joined = torch.cat(tuple(taps), dim=-1)
        if self.input_norm is not None:
            joined = self.input_norm(joined)
        return self.fc(joined)

    def forward(
        self,
        ids: torch.Tensor,
        feature: torch.Tensor,
        positions: torch.Tensor,
        meta: AttentionMetadata,
        caches: Sequence[KVCache],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute tokens, writing their keys and values.

        Args:
            ids: ``[T]`` int64.
            feature: ``[T, H]``, of the token before each.
            positions: ``[T]`` int64, of the feature: one less than the token's.

        Returns:
            Each token's feature ``[T, H]``, and what :meth:`logits` takes, ``[T, H]``.
        """
        embedded = self._embed(ids)
        rotation = self.rotary(positions)
        first = self._layers[0]
        if self.spec.eagle3:
            assert self.hidden_norm is not None and self.norm is not None  # no such head without them
            hidden = self.hidden_norm(feature)
            residual = hidden if self.spec.norm_before_residual else feature
            inputs = torch.cat((first.input_layernorm(embedded), hidden), dim=-1)
            attended = first.self_attn(inputs, rotation, meta, caches[0])
            x, residual = first.post_attention_layernorm.add(attended, residual)
            x = first.mlp(x)
        else:
            assert self.fc is not None
            if self.embedding_layernorm is not None:
                embedded = self.embedding_layernorm(embedded)
            x, residual = first(
                self.fc(torch.cat((embedded, feature), dim=-1)), None, rotation, meta, caches[0]
            )
        for layer, cache in zip(self._layers[1:], caches[1:], strict=True):
            x, residual = layer(x, residual, rotation, meta, cache)
        if self.norm is not None and self.spec.eagle3:
            states, feature = self.norm.add(x, residual)
            return (states if self.spec.norm_output else feature), states
        feature = residual + x
        if self.pre_lm_head_layernorm is not None:
            return feature, self.pre_lm_head_layernorm(feature)
        return feature, feature

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """``[R, H] -> [R, V]`` float32; -inf for tokens that the head cannot draft."""
        if self.lm_head is None:
            assert self.target_lm_head is not None
            logits = self.target_lm_head(states)
            return (
                logits if self.draft_ids is None else self._spread(logits[:, self.draft_ids], self.draft_ids)
            )
        logits = self.lm_head(states).float()
        if self.draft_ids is not None:
            return self._spread(logits, self.draft_ids)
        missing = self.spec.vocab_size - logits.shape[1]  # another padding than the target's
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits

    def _spread(self, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        whole = logits.new_full((logits.shape[0], self.spec.vocab_size), -torch.inf)
        return whole.index_copy_(1, ids, logits)

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        if self.embed_tokens is not None:
            return self.embed_tokens(ids)
        assert self.target_embed is not None
        return self.target_embed(ids)


def _decoder_config(spec: HeadSpec) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rms_norm_eps=spec.rms_norm_eps,
        rope=RopeConfig(
            head_dim=spec.head_dim,
            max_position_embeddings=spec.max_positions,
            parameters=spec.rope,
        ),
        windows=(None,) * spec.num_layers,
        rotary_layers=(True,) * spec.num_layers,
        hidden_act=spec.hidden_act,
        qkv_bias=spec.has("layers.0.self_attn.q_proj.bias"),
        out_bias=spec.has("layers.0.self_attn.o_proj.bias"),
        mlp_bias=spec.has("layers.0.mlp.gate_proj.bias"),
    )
