"""The drafter: tokens, the target's states and mask tokens to states that the target's output layer reads.

Shapes: ``T`` tokens, ``H`` the target's hidden size, ``h`` the drafter's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from specdecode.contract import EMBED, LM_HEAD, ConfigError, TargetHandle
from specdecode.heads.layers import layer_config
from specdecode.heads.loading import pack_linears
from specdecode.layers import ColumnParallelLinear, KVCache, RMSNorm, RotaryEmbedding
from specdecode.models import DecoderLayer, randomize

from .checkpoint import Drafter, DrafterShape


class ParallelDrafter(torch.nn.Module):
    """Decoder layers over two kinds of tokens.

    A *fed* token comes with the target's states at the token before it: ``fc`` makes one vector of its
    embedding and of them. A *mask* token is one learned vector, the same at every place: its position and
    what it attends to make the difference. Embeddings and output layer are the target's.
    """

    def __init__(
        self,
        shape: DrafterShape,
        *,
        embed: Callable[[torch.Tensor], torch.Tensor],
        lm_head: Callable[[torch.Tensor], torch.Tensor],
        vocab_size: int,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._embed, self._lm_head = embed, lm_head
        target, hidden, eps = shape.target_hidden_size, shape.hidden_size, shape.rms_norm_eps
        options: dict[str, Any] = {"dtype": dtype, "device": device}
        config = layer_config(
            vocab_size=vocab_size,
            hidden_size=hidden,
            intermediate_size=shape.intermediate_size,
            num_layers=shape.num_layers,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            rms_norm_eps=eps,
            rope=shape.rope,
            max_positions=max_positions,
        )
        self.embed_norm = RMSNorm(target, eps, **options)
        self.tap_norms = torch.nn.ModuleList(RMSNorm(target, eps, **options) for _ in shape.taps)
        self.fc = ColumnParallelLinear((1 + len(shape.taps)) * target, hidden, **options)
        self.mask = torch.nn.Parameter(torch.zeros(hidden, **options), requires_grad=False)
        self.layers = torch.nn.ModuleList(
            DecoderLayer(config, layer, **options) for layer in range(shape.num_layers)
        )
        self.norm = RMSNorm(hidden, eps, **options)
        self.out = ColumnParallelLinear(hidden, target, **options)
        self.rotary = RotaryEmbedding(config.rope, max_positions, device=device)

    def feed(self, ids: torch.Tensor, taps: Sequence[torch.Tensor]) -> torch.Tensor:
        """``[T]`` ids and ``[T, H]`` states at the tokens before them -> ``[T, h]``."""
        parts = [self.embed_norm(self._embed(ids))]
        parts += [norm(tap) for norm, tap in zip(self.tap_norms, taps, strict=True)]
        joined: torch.Tensor = self.fc(torch.cat(parts, -1))
        return joined

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, meta: Any, caches: Sequence[KVCache]
    ) -> torch.Tensor:
        """``[T, h]`` -> ``[T, h]``; each layer writes the entries of all tokens before any is read."""
        rotation = self.rotary(positions)
        residual = None
        for layer, cache in zip(self.layers, caches, strict=True):
            x, residual = layer(x, residual, rotation, meta, cache)
        assert residual is not None  # there is a layer
        return self.norm.add(x, residual)[0]

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """``[R, h]`` -> ``[R, vocabulary]``."""
        return self._lm_head(self.out(states))


@torch.inference_mode()
def load_drafter(drafter: Drafter, target: TargetHandle) -> ParallelDrafter:
    """The drafter on the target's device, in its dtype, with the weights of its checkpoint.

    Raises:
        ConfigError: the files hold less than their headers said.
    """
    model = ParallelDrafter(
        drafter.shape,
        embed=target.modules[EMBED],
        lm_head=target.modules[LM_HEAD],
        vocab_size=target.info.vocab_size,
        max_positions=target.info.max_model_len + drafter.shape.num_draft_tokens,
        dtype=target.dtype,
        device=target.device,
    )
    if drafter.dummy:
        randomize(model)
    else:
        missing = set(drafter.shape.tensors())
        for name, tensor in target.load_weights(drafter.path, set(missing)):
            _fill(model, name, tensor)
            missing.discard(name)
        if missing:
            raise ConfigError(f"{drafter.path} lost {', '.join(sorted(missing))} while it was read")
    pack_linears(model, target.dtype, target.device)
    return model.eval()


def _fill(model: ParallelDrafter, name: str, tensor: torch.Tensor) -> None:
    if name == "mask":
        model.mask.copy_(tensor)
        return
    module, kind = name.rsplit(".", 1)
    part = None
    if module.startswith("layers."):  # where some are fused
        _, layer, inner = module.split(".", 2)
        inner, part = DecoderLayer.FUSED.get(inner, (inner, None))
        module = f"layers.{layer}.{inner}"
    place: Any = model.get_submodule(module)
    place.load(kind, tensor, part)
