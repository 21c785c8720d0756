"""A module: hidden states and tokens to hidden states, by an ordinary layer of the target.

Shapes: ``T`` tokens, ``H`` hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from specdec_kernels.attention import AttentionMetadata
from specdec_kernels.projection import Stream, join, normalize, product
from specdecode.contract import EMBED, ConfigError, TargetHandle, TargetUpdate
from specdecode.heads.layers import layer_config
from specdecode.heads.loading import pack_linears, take_weights
from specdecode.layers import (
    ColumnParallelLinear,
    KVCache,
    RMSNorm,
    RotaryEmbedding,
    VocabEmbedding,
)
from specdecode.models import (
    DecoderConfig,
    DecoderLayer,
    TransformersLayer,
    can_fuse,
    fused_layer,
    resolve_model,
)

from .layouts import PROJECTION
from .spec import MtpSpec, NativeBlock

Embed = Callable[[torch.Tensor], torch.Tensor]
Weights = Mapping[str, torch.Tensor]


class MtpModule(torch.nn.Module):
    """One module (DeepSeek-V3, arXiv 2412.19437, section 2.2): norms, a projection, a layer, a norm.

    Where the native decoder's fused kernels run its layer, norms and joining are one launch.

    Args:
        weights: the module's tensors, by the names of :mod:`.layouts`, on the CPU.
        block: the layer with the norm behind it; see :class:`Block`.
    """

    def __init__(self, spec: MtpSpec, weights: Weights, target: TargetHandle, block: torch.nn.Module) -> None:
        super().__init__()
        kind = {"dtype": target.dtype, "device": target.device}
        hidden = spec.hidden_size
        self._embed: Embed = target.modules[EMBED]
        self._eps = spec.rms_norm_eps
        self.embedding_norm = RMSNorm(hidden, spec.rms_norm_eps, **kind)
        self.hidden_norm = RMSNorm(hidden, spec.rms_norm_eps, **kind)
        self.projection = ColumnParallelLinear(2 * hidden, hidden, **kind)
        self.embedding_norm.load("weight", weights["embedding_norm.weight"])
        self.hidden_norm.load("weight", weights["hidden_norm.weight"])
        projection = weights[PROJECTION]
        if spec.layout.hidden_first:  # here the embedding is
            projection = torch.cat((projection[:, hidden:], projection[:, :hidden]), dim=1)
        self.projection.load("weight", projection)
        self.block = block
        # Embedding a token is reading a row of this.
        table = self._embed.weight if isinstance(self._embed, VocabEmbedding) else None
        self._table = table if isinstance(block, Block) and block.fused else None

    def forward(
        self,
        ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        meta: AttentionMetadata,
        cache: KVCache,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute tokens, writing their keys and values.

        Args:
            ids: ``[T]`` int64.
            hidden: ``[T, H]``, of the token before each: the target's, or of the module before this one.
            positions: ``[T]`` int64.

        Returns:
            ``[T, H]`` behind the final norm, of which the target's output layer makes logits, and before it.
        """
        if self._table is not None and len(ids):
            gains = {"table_gain": self.embedding_norm.weight, "feature_gain": self.hidden_norm.weight}
            joined = join(ids, self._table, hidden, eps=self._eps, **gains)
            x = product(joined, self.projection.weight)
        else:
            x = self.projection(
                torch.cat((self.embedding_norm(self._embed(ids)), self.hidden_norm(hidden)), dim=-1)
            )
        states, stream = self.block(x, positions, meta, cache)
        return states, stream


class Block(torch.nn.Module):
    """A layer of the native decoder and the norm behind it, as ``TransformersLayer`` is of other models."""

    def __init__(self, spec: MtpSpec, block: NativeBlock, weights: Weights, target: TargetHandle) -> None:
        super().__init__()
        kind = {"dtype": target.dtype, "device": target.device}
        self._config = config = _layer_config(spec, block, target)
        self.fused = can_fuse(target.dtype, target.device)
        self.layer = DecoderLayer(config, **kind)
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, **kind)
        self.rotary = RotaryEmbedding(config.rope, target.info.max_model_len, device=target.device)
        self.norm.load("weight", weights["final_norm.weight"])
        for name, tensor in weights.items():
            if name.startswith("block."):
                path, what = name.removeprefix("block.").rsplit(".", 1)
                path, part = DecoderLayer.FUSED.get(path, (path, None))
                self.layer.get_submodule(path).load(what, tensor, part)  # type: ignore[operator]

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, meta: AttentionMetadata, cache: KVCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``[T, H]`` to ``[T, H]`` behind the norm and ``[T, H]`` before it."""
        if self.fused and len(x):
            gain, normed = self.norm.weight, self.layer.input_layernorm(x)
            left = fused_layer(
                self.layer,
                Stream(x, normed, None),
                self.rotary,
                positions,
                meta,
                cache,
                gain,
                config=self._config,
            )
            return normalize(left, gain, self._config.rms_norm_eps), left.residual
        x, residual = self.layer(x, None, self.rotary(positions), meta, cache)
        states, stream = self.norm.add(x, residual)
        return states, stream


@torch.inference_mode()
def load_modules(spec: MtpSpec, count: int, target: TargetHandle) -> torch.nn.ModuleList:
    """The first ``count`` modules on the target's device, in its dtype.

    Raises:
        ConfigError: the files hold less than their headers said.
    """
    return torch.nn.ModuleList(_load(spec, names, target) for names in spec.names[:count]).eval()


@torch.inference_mode()
def reload_modules(modules: torch.nn.ModuleList, spec: MtpSpec, update: TargetUpdate) -> bool:
    """Give ``modules`` the weights that came with the target's new ones, in place; False if none did.

    Raises:
        ConfigError: only some of them came.
    """
    names = spec.names[: len(modules)]
    wanted = {stored for module in names for stored in module.values()}
    if not any(True for _ in update.load_weights(wanted)):
        return False
    fresh = [_make(spec, own, update.target, update.load_weights) for own in names]
    for module, new in zip(modules, fresh, strict=True):
        take_weights(module, new)
    return True


def _load(spec: MtpSpec, names: Mapping[str, str], target: TargetHandle) -> MtpModule:
    return _make(spec, names, target, functools.partial(target.load_weights, spec.path))


def _make(
    spec: MtpSpec, names: Mapping[str, str], target: TargetHandle, load_weights: Callable[..., Any]
) -> MtpModule:
    stored = {name: canonical for canonical, name in names.items()}
    weights = {stored[name]: tensor for name, tensor in load_weights(stored)}
    if missing := sorted(set(names) - set(weights)):
        raise ConfigError(f"the target's weights hold no {', '.join(missing)}, of the checkpoint {spec.path}")
    if spec.block is not None:
        block: torch.nn.Module = Block(spec, spec.block, weights, target)
    else:
        block = TransformersLayer(
            resolve_model(target.info.path),
            {n.removeprefix("block."): t for n, t in weights.items() if n.startswith("block.")},
            weights["final_norm.weight"],
            dtype=target.dtype,
            device=target.device,
            max_model_len=target.info.max_model_len,
        )
    module = MtpModule(spec, weights, target, block)
    if not (isinstance(block, Block) and block.fused):
        pack_linears(module, target.dtype, target.device)
    return module


def _layer_config(spec: MtpSpec, block: NativeBlock, target: TargetHandle) -> DecoderConfig:
    fields = block.fields
    return layer_config(
        vocab_size=target.info.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=block.intermediate_size,
        num_heads=fields.num_heads,
        num_kv_heads=block.num_kv_heads,
        head_dim=block.head_dim,
        rms_norm_eps=spec.rms_norm_eps,
        rope=fields.rope,
        max_positions=fields.max_positions,
        hidden_act=fields.hidden_act,
        qkv_bias=block.qkv_bias,
        out_bias=block.out_bias,
        mlp_bias=block.mlp_bias,
        qk_norm=block.qk_norm,
    )
