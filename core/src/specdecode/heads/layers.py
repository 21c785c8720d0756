"""Layers of heads, which are those of the native decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..layers import RopeConfig
from ..models import DecoderConfig


def layer_config(
    *,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rms_norm_eps: float,
    rope: Mapping[str, Any],
    max_positions: int,
    num_layers: int = 1,
    hidden_act: str = "silu",
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> DecoderConfig:
    """The config of layers that attend to everything before them and rotate by its position.

    Args:
        rope: rope parameters, as of :func:`~specdecode.heads.fields.rope_parameters`.
        max_positions: ``max_position_embeddings``: what ``rope`` was made for.
    """
    return DecoderConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=rms_norm_eps,
        rope=RopeConfig(head_dim=head_dim, max_position_embeddings=max_positions, parameters=rope),
        windows=(None,) * num_layers,
        rotary_layers=(True,) * num_layers,
        hidden_act=hidden_act,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
    )
