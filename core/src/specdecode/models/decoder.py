"""The native decoder: one configurable model for the Llama family.

Shapes: ``T`` tokens of all rows of a step, ``H`` hidden size, ``V`` vocabulary. It knows nothing of
requests or batches; which slots a token writes and sees is in its :class:`AttentionMetadata`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import torch
from specdec_kernels import activation
from specdec_kernels.attention import AttentionMetadata
from specdec_kernels.projection import product
from specdec_kernels.rotary import apply_rotary

from specdecode.distributed import SOLO, Group, head_shares
from specdecode.layers import (
    Attention,
    GivenEmbeddings,
    KVCache,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RMSNorm,
    RotaryEmbedding,
    RotatingBackend,
    Rotation,
    RowParallelLinear,
    TokenAdapters,
    VocabEmbedding,
    VocabParallelLinear,
)

from .capturing import Capturable
from .config import ACTIVATIONS, DecoderConfig
from .experts import SparseMLP
from .fused import can_fuse, fused_forward


class SelfAttention(torch.nn.Module):
    """Multi-head attention with grouped KV heads and rotary positions."""

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        backend: RotatingBackend | None = None,
        group: Group = SOLO,
    ) -> None:
        super().__init__()
        queries, keys = head_shares(config.num_heads, config.num_kv_heads, group.rank, group.size)
        self.num_heads, self.num_kv_heads, self.head_dim = queries.size, keys.size, config.head_dim
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            bias=config.qkv_bias,
            dtype=dtype,
            device=device,
            group=group,
        )
        self.o_proj = RowParallelLinear(
            config.num_heads * config.head_dim,
            config.hidden_size,
            bias=config.out_bias,
            dtype=dtype,
            device=device,
            group=group,
        )
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype, device=device)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype, device=device)
        self.rotary = config.rotary_layers[layer]
        self.attention = Attention(config.head_dim**-0.5, window=config.windows[layer], backend=backend)

    def forward(
        self, x: torch.Tensor, rotation: Rotation, meta: AttentionMetadata, cache: KVCache
    ) -> torch.Tensor:
        """``[T, H] -> [T, H]``."""
        query = self.write(x, rotation, meta, cache)
        return self.o_proj(self.attention.attend(query, meta, cache).flatten(1))

    def write(
        self, x: torch.Tensor, rotation: Rotation, meta: AttentionMetadata, cache: KVCache
    ) -> torch.Tensor:
        """Write the keys and values of ``x`` ``[T, H]``, and no more: the queries, ``[T, Hq, D]``."""
        heads = self.qkv_proj(x).unflatten(1, (-1, self.head_dim))  # T may be 0
        if self.rotary and self.q_norm is None:
            return self.attention.rotate_and_write(heads, rotation, meta, cache)
        query, key, value = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), 1)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if self.rotary:
            query, key = apply_rotary(query, key, *rotation)
        self.attention.write(key, value, meta, cache)
        return query


class MLP(torch.nn.Module):
    """Gated MLP."""

    def __init__(
        self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device, group: Group = SOLO
    ) -> None:
        super().__init__()
        size = config.intermediate_size
        kind: dict[str, Any] = {"bias": config.mlp_bias, "dtype": dtype, "device": device, "group": group}
        parts = {"gate": size, "up": size}
        self.gate_up_proj = MergedColumnParallelLinear(config.hidden_size, parts, **kind)
        self.down_proj = RowParallelLinear(size, config.hidden_size, **kind)
        self.activation = getattr(activation, ACTIVATIONS[config.hidden_act])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, H] -> [T, H]``."""
        return self.down_proj(self.activation(self.gate_up_proj(x)))


class DecoderLayer(torch.nn.Module):
    """One block: attention and MLP (or experts), each behind a norm and added to the residual stream."""

    #: Checkpoint module -> (fused module, its part).
    FUSED: ClassVar[dict[str, tuple[str, str]]] = {
        "self_attn.q_proj": ("self_attn.qkv_proj", "q"),
        "self_attn.k_proj": ("self_attn.qkv_proj", "k"),
        "self_attn.v_proj": ("self_attn.qkv_proj", "v"),
        "mlp.gate_proj": ("mlp.gate_up_proj", "gate"),
        "mlp.up_proj": ("mlp.gate_up_proj", "up"),
    }

    def __init__(
        self,
        config: DecoderConfig,
        layer: int = 0,
        *,
        dtype: torch.dtype,
        device: torch.device,
        backend: RotatingBackend | None = None,
        group: Group = SOLO,
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.self_attn = SelfAttention(
            config, layer, dtype=dtype, device=device, backend=backend, group=group
        )
        self.post_attention_layernorm = RMSNorm(
            config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device
        )
        mixture = config.experts_of(layer)
        self.mlp: MLP | SparseMLP = (
            MLP(config, dtype=dtype, device=device, group=group)
            if mixture is None
            else SparseMLP(config, mixture, dtype=dtype, device=device, group=group)
        )

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rotation: Rotation,
        meta: AttentionMetadata,
        cache: KVCache,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream travels as a pair, so that its additions can be fused with the norms.

        Args:
            x: ``[T, H]``, what the block before gave.
            residual: ``[T, H]``; the stream that enters this block is ``residual + x``, or ``x``
                alone if None.
            rotation: cosine and sine of the tokens' positions.

        Returns:
            ``(x, residual)``, whose sum is the stream that leaves the block.
        """
        x, residual = self._enter(x, residual)
        x = self.self_attn(x, rotation, meta, cache)
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x), residual

    def write(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rotation: Rotation,
        meta: AttentionMetadata,
        cache: KVCache,
    ) -> None:
        """Write the keys and values alone, where nobody wants what leaves the block."""
        self.self_attn.write(self._enter(x, residual)[0], rotation, meta, cache)

    def _enter(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            return self.input_layernorm(x), x
        return self.input_layernorm.add(x, residual)


class Decoder(torch.nn.Module):
    """Token ids to hidden states, and hidden states to logits.

    Attributes:
        fused: whether it computes by :func:`~specdecode.models.fused.fused_forward` and not by its layers.
        group: the ranks that each hold a share of it. Hidden states and logits are whole on every rank.
        adapters: which adapter each token of a forward has, where there is room for any.
    """

    capturable: ClassVar[Capturable] = Capturable.ALWAYS

    def __init__(
        self,
        config: DecoderConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        backend: RotatingBackend | None = None,
        group: Group = SOLO,
        whole_embedding: bool = False,
    ) -> None:
        """``whole_embedding``: every rank holds all rows of the embedding, since a drafter reads them."""
        super().__init__()
        self.config = config
        self.group = group
        self.dtype = dtype
        self.device = device
        self.max_model_len = max_model_len
        self.fused = can_fuse(dtype, device, backend)
        self.adapters: TokenAdapters | None = None
        self.embed_tokens = VocabEmbedding(
            config.vocab_size,
            config.hidden_size,
            dtype=dtype,
            device=device,
            group=group,
            whole=whole_embedding,
        )
        self.layers = torch.nn.ModuleList(
            DecoderLayer(config, layer, dtype=dtype, device=device, backend=backend, group=group)
            for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.rotary = RotaryEmbedding(config.rope, max_model_len, device=device)
        self.lm_head = VocabParallelLinear(
            config.hidden_size, config.vocab_size, dtype=dtype, device=device, group=group
        )
        if config.tie_word_embeddings:
            self.lm_head.tie(self.embed_tokens)

    @property
    def code(self) -> str:
        """What computes its steps, as messages call it."""
        return "the native decoder"

    @property
    def kv_heads(self) -> int:
        """KV heads that this rank computes."""
        return head_shares(self.config.num_heads, self.config.num_kv_heads, self.group.rank, self.group.size)[
            1
        ].size

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        meta: AttentionMetadata,
        caches: Sequence[KVCache],
        taps: Collection[int] = (),
        given: GivenEmbeddings | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Compute the step's tokens, writing their keys and values.

        Args:
            ids, positions: ``[T]`` int64.
            meta: where each token writes and what it sees.
            caches: one for each layer.
            taps: boundaries ``0..L`` whose residual stream is wanted: that which enters block
                ``i``, or before the final norm for ``L``.
            given: embeddings of tokens that stand for parts of images.

        Returns:
            ``[T, H]`` after the final norm, and one ``[T, H]`` for each tap, in the order of ``taps``.
        """
        if self.fused:
            return fused_forward(self, ids, positions, meta, caches, taps, given)
        x: torch.Tensor = self.embed_tokens(ids)
        if given is not None:
            x = given.put_into(x)
        residual: torch.Tensor | None = None
        rotation = self.rotary(positions)
        tapped: dict[int, torch.Tensor] = {}
        for index, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            if index in taps:
                tapped[index] = x if residual is None else residual + x
            x, residual = layer(x, residual, rotation, meta, cache)
        assert residual is not None  # there is at least one layer
        hidden, tapped[len(self.layers)] = self.norm.add(x, residual)
        return hidden, tuple(tapped[boundary] for boundary in taps)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[R, H]`` after the final norm -> ``[R, V]`` float32."""
        return self.logits(hidden).float()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The same in the model's dtype, in which they are computed."""
        if self.fused and hidden.shape[0]:
            return self.lm_head.gather(product(hidden, self.lm_head.operand))
        logits: torch.Tensor = self.lm_head(hidden)
        return logits
