"""Families of the native decoder: how each one's Hugging Face config reads."""

from __future__ import annotations

from typing import Any

from specdecode.contract import ConfigError
from specdecode.layers.rotary import RopeConfig

from ..heads.native import FAMILIES, Family
from .config import DecoderConfig, ExpertsConfig


def decoder_config(config: Any, architecture: str) -> DecoderConfig:
    """The native decoder of a Hugging Face config; ConfigError for an architecture that is not native."""
    family = FAMILIES.get(architecture)
    if family is None:
        raise ConfigError(
            f"architecture {architecture!r} of the model's config is none of the native decoder's; "
            f"use a model of one of {', '.join(sorted(FAMILIES))}"
        )
    layers = config.num_hidden_layers
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return DecoderConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        rms_norm_eps=config.rms_norm_eps,
        rope=RopeConfig(
            head_dim=head_dim,
            max_position_embeddings=config.max_position_embeddings,
            parameters=config.rope_parameters,
        ),
        windows=_windows(config, family),
        rotary_layers=_rotary_layers(config, family),
        hidden_act=config.hidden_act,
        qkv_bias=config.attention_bias if family.qkv_bias is None else family.qkv_bias,
        out_bias=config.attention_bias if family.out_bias is None else family.out_bias,
        mlp_bias=config.mlp_bias if family.mlp_bias is None else family.mlp_bias,
        qk_norm=family.qk_norm,
        experts=_experts(config, family),
        tie_word_embeddings=config.tie_word_embeddings,
    )


def _windows(config: Any, family: Family) -> tuple[int | None, ...]:
    if family.windows == "layers":
        return tuple(
            config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types
        )
    return (config.sliding_window if family.windows == "all" else None,) * config.num_hidden_layers


def _rotary_layers(config: Any, family: Family) -> tuple[bool, ...]:
    layers: int = config.num_hidden_layers
    if family.some_unrotated:
        return tuple(bool(rotates) for rotates in config.no_rope_layers[:layers])
    return (True,) * layers


def _experts(config: Any, family: Family) -> ExpertsConfig | None:
    mixture = family.mixture
    if mixture is None or not config.num_experts:
        return None
    layers = [True] * config.num_hidden_layers
    if mixture.some_dense:
        step, dense = config.decoder_sparse_step, config.mlp_only_layers or ()
        layers = [layer not in dense and (layer + 1) % step == 0 for layer in range(len(layers))]
    return ExpertsConfig(
        num_experts=config.num_experts,
        count=config.num_experts_per_tok,
        intermediate_size=getattr(config, mixture.size),
        normalize=config.norm_topk_prob if mixture.normalized is None else mixture.normalized,
        layers=tuple(layers),
    )
