"""Trainable parts of the Llama family, float32 weights, with the names of published checkpoints.

``[B, T]`` rows of packed documents go through at once; :class:`Rows` says what sees what. The engine's own
layers (``specdecode.layers``) fuse their weights and page their KV, and are no help here; tests hold both to
the same results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from specdecode.layers import RopeConfig
from torch.nn import functional

from .recipe import TrainingTarget

ACTIVATIONS = {
    "silu": functional.silu,
    "swish": functional.silu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}
#: Columns of scores are filled up to a multiple of this.
_ALIGNED = 8
Rotation = tuple[torch.Tensor, torch.Tensor]
#: Keys and values of one pass, ``[B, kv heads, T, head_dim]``, keys rotated.
Entries = tuple[torch.Tensor, torch.Tensor]


class RMSNorm(torch.nn.Module):
    """In float32, whatever the input; the output has the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # One kernel on a GPU, and one for its gradient.
        return functional.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)


def linear(inputs: int, outputs: int, *, bias: bool = False, std: float = 0.02) -> torch.nn.Linear:
    """A linear layer with normal weights and no bias as it begins."""
    layer = torch.nn.Linear(inputs, outputs, bias=bias)
    torch.nn.init.normal_(layer.weight, std=std)
    if bias:
        torch.nn.init.zeros_(layer.bias)
    return layer


class Rope:
    """Cosines and sines by position, float32, on one device; no module, nothing to train."""

    def __init__(self, config: RopeConfig, length: int, device: torch.device) -> None:
        frequencies, factor = config.inverse_frequencies(length)
        angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
        self._cos, self._sin = (angles.cos() * factor).to(device), (angles.sin() * factor).to(device)

    def __call__(self, positions: torch.Tensor) -> Rotation:
        """``[B, T]`` -> cosine and sine ``[B, 1, T, R/2]``."""
        return self._cos[positions][:, None], self._sin[positions][:, None]


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """``[B, heads, T, head_dim]``; dimensions behind the first ``R`` pass."""
    cos, sin = rotation
    half = cos.shape[-1]
    first, second, rest = x.float().split((half, half, x.shape[-1] - 2 * half), -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1).to(x.dtype)


@attrs.frozen(eq=False)
class Rows:
    """What the tokens of packed rows see: ``mask`` is ``[B, 1, T, T]`` bool."""

    mask: torch.Tensor

    @classmethod
    def causal(cls, documents: torch.Tensor, entries: torch.Tensor | None = None) -> Rows:
        """Each token sees itself and those before it of its own document.

        Args:
            documents: ``[B, T]``; a padding token sees itself.
            entries: ``[B, T]`` bool, tokens that others see; None: all. Where a layer is fed with the state
                before each token, the first one of a document is not there (``KVSpec.first``).
        """
        length = documents.shape[1]
        order = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
        mask = (documents[:, :, None] == documents[:, None, :]) & order
        if entries is not None:
            mask &= entries[:, None, :]
        own = torch.eye(length, dtype=torch.bool, device=documents.device)
        return cls((mask | own)[:, None])  # no row without a key: its softmax would be NaN


class Attention(torch.nn.Module):
    """Grouped-query attention over packed rows, and over what a draft has added to them."""

    def __init__(
        self,
        inputs: int,
        hidden: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        bias: bool = False,
        out_bias: bool = False,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.q_proj = linear(inputs, num_heads * head_dim, bias=bias)
        self.k_proj = linear(inputs, num_kv_heads * head_dim, bias=bias)
        self.v_proj = linear(inputs, num_kv_heads * head_dim, bias=bias)
        self.o_proj = linear(num_heads * head_dim, hidden, bias=out_bias)

    def forward(
        self, x: torch.Tensor, rotation: Rotation, rows: Rows, before: Sequence[Entries] = ()
    ) -> tuple[torch.Tensor, Entries]:
        """``[B, T, inputs] -> [B, T, hidden]``, and the entries of this pass.

        Args:
            before: of a draft unrolled in training (EAGLE-3's training-time test): the entries of earlier
                passes. The first are the true ones, which token ``t`` sees as ``rows`` says; of each later
                pass, this one included, it sees the entry at ``t`` alone, which its own draft has made.
        """
        query, key, value = (self._heads(p(x)) for p in (self.q_proj, self.k_proj, self.v_proj))
        query, key = rotate(query, rotation), rotate(key, rotation)
        if before:
            attended = _drafting(query, [*before, (key, value)], rows.mask)
        else:
            keys, values = _spread(key, self.num_heads), _spread(value, self.num_heads)
            attended = functional.scaled_dot_product_attention(query, keys, values, attn_mask=rows.mask)
        return self.o_proj(attended.transpose(1, 2).flatten(2)), (key, value)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def _spread(entries: torch.Tensor, num_heads: int) -> torch.Tensor:
    """``[B, kv heads, T, d] -> [B, heads, T, d]``."""
    times = num_heads // entries.shape[1]
    return entries if times == 1 else entries.repeat_interleave(times, 1)


def _drafting(query: torch.Tensor, passes: Sequence[Entries], mask: torch.Tensor) -> torch.Tensor:
    """Attention of a draft's later passes: a block of true entries, and one drafted entry of each pass."""
    (keys, values), drafted = passes[0], passes[1:]
    heads, scale = query.shape[1], query.shape[-1] ** -0.5
    grouped = query.unflatten(1, (keys.shape[1], -1))  # [B, kv heads, group, T, d]
    block = (grouped * scale) @ keys[:, :, None].transpose(-1, -2)
    block = block.masked_fill(~mask[:, :, None], -torch.inf)
    own = torch.stack([(grouped * scale * key[:, :, None]).sum(-1) for key, _ in drafted], -1)
    # Rows of scores stay aligned: products of matrices whose rows are not are several times slower.
    own = functional.pad(own.to(block.dtype), (0, -own.shape[-1] % _ALIGNED), value=-torch.inf)
    weights = torch.cat((block, own), -1).softmax(-1, dtype=torch.float32).to(query.dtype)
    length = block.shape[-1]
    attended = weights[..., :length] @ values[:, :, None]
    for index, (_, value) in enumerate(drafted):
        attended = attended + weights[..., length + index, None] * value[:, :, None]
    return attended.flatten(1, 2).view(query.shape[0], heads, *query.shape[2:])


class MLP(torch.nn.Module):
    """Gated MLP."""

    def __init__(self, hidden: int, intermediate: int, *, act: str = "silu", bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = linear(hidden, intermediate, bias=bias)
        self.up_proj = linear(hidden, intermediate, bias=bias)
        self.down_proj = linear(intermediate, hidden, bias=bias)
        self._act = ACTIVATIONS[act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self._act(self.gate_proj(x)) * self.up_proj(x))


@attrs.frozen(kw_only=True)
class LayerShape:
    """Sizes of a decoder layer."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    hidden_act: str = "silu"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    rope: Mapping[str, Any]  #: ``rope_parameters``
    max_positions: int

    @property
    def rope_config(self) -> RopeConfig:
        return RopeConfig(
            head_dim=self.head_dim, max_position_embeddings=self.max_positions, parameters=self.rope
        )

    def config(self, **more: Any) -> dict[str, Any]:
        """The fields of a Llama ``config.json``, in the spelling that every reader knows."""
        rope = {key: value for key, value in self.rope.items() if key not in ("rope_theta", "rope_type")}
        if (kind := self.rope.get("rope_type", "default")) != "default":
            more = {"rope_scaling": {"rope_type": kind, **rope}, **more}
        return {
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.rms_norm_eps,
            "hidden_act": self.hidden_act,
            "rope_theta": self.rope["rope_theta"],
            "max_position_embeddings": self.max_positions,
            **more,
        }


def shape_like(
    target: TrainingTarget,
    *,
    intermediate_size: int | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
) -> LayerShape:
    """A layer of the target's sizes, but for what is said."""
    info, config = target.info, target.info.config
    rope = dict(config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)})
    rope.setdefault("rope_type", "default")
    return LayerShape(
        hidden_size=info.hidden_size,
        intermediate_size=intermediate_size or config["intermediate_size"],
        num_heads=num_heads or info.num_heads,
        num_kv_heads=num_kv_heads or num_heads or info.num_kv_heads,
        head_dim=info.head_dim,
        rms_norm_eps=target.rms_norm_eps,
        hidden_act=config.get("hidden_act", "silu"),
        rope=rope,
        max_positions=config["max_position_embeddings"],
    )


class DecoderLayer(torch.nn.Module):
    """A pre-norm block of the Llama family.

    Args:
        inputs: of queries, keys and values; None: the hidden size.
        input_norm: whether attention's input is normed here.
    """

    def __init__(self, shape: LayerShape, *, inputs: int | None = None, input_norm: bool = True) -> None:
        super().__init__()
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps) if input_norm else None
        self.self_attn = Attention(
            inputs or hidden,
            hidden,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            bias=shape.qkv_bias,
            out_bias=shape.out_bias,
        )
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = MLP(hidden, shape.intermediate_size, act=shape.hidden_act, bias=shape.mlp_bias)

    def forward(
        self, x: torch.Tensor, rotation: Rotation, rows: Rows, before: Sequence[Entries] = ()
    ) -> tuple[torch.Tensor, Entries]:
        """``[B, T, hidden]``, the stream that leaves the block, and the entries of its attention."""
        normed = x if self.input_layernorm is None else self.input_layernorm(x)
        attended, entries = self.self_attn(normed, rotation, rows, before)
        return self.close(x + attended), entries

    def close(self, x: torch.Tensor) -> torch.Tensor:
        """Behind attention and its addition: the MLP and its own."""
        return x + self.mlp(self.post_attention_layernorm(x))
