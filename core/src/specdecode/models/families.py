"""Families of the native decoder: how each one's Hugging Face config reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specdecode.contract import ConfigError
from specdecode.layers.rotary import RopeConfig

from .config import DecoderConfig


def llama(config: Any) -> DecoderConfig:
    """Llama, and the many checkpoints that call themselves so (SmolLM among them)."""
    return _decoder(
        config,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
    )


def mistral(config: Any) -> DecoderConfig:
    """Mistral: one sliding window for all layers, or none."""
    return _decoder(config, windows=(config.sliding_window,) * config.num_hidden_layers)


def qwen2(config: Any) -> DecoderConfig:
    """Qwen2: biases on queries, keys and values; sliding windows by layer."""
    return _decoder(config, qkv_bias=True, windows=_windows(config))


def qwen3(config: Any) -> DecoderConfig:
    """Qwen3: norms on query and key heads; sliding windows by layer."""
    return _decoder(
        config,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        qk_norm=True,
        windows=_windows(config),
    )


def smollm3(config: Any) -> DecoderConfig:
    """SmolLM3: some layers have no rotary positions."""
    return _decoder(
        config,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
        windows=_windows(config),
        rotary_layers=tuple(bool(rotates) for rotates in config.no_rope_layers[: config.num_hidden_layers]),
    )


#: ``architectures[0]`` of a config -> how to read it.
FAMILIES: dict[str, Callable[[Any], DecoderConfig]] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "SmolLM3ForCausalLM": smollm3,
}


def decoder_config(config: Any, architecture: str) -> DecoderConfig:
    """The native decoder of a Hugging Face config; ConfigError for an architecture that is not native."""
    family = FAMILIES.get(architecture)
    if family is None:
        raise ConfigError(
            f"architecture {architecture!r} of the model's config is none of the native decoder's; "
            f"use a model of one of {', '.join(sorted(FAMILIES))}"
        )
    return family(config)


def _decoder(config: Any, **options: Any) -> DecoderConfig:
    layers = config.num_hidden_layers
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    fields = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_layers": layers,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope": RopeConfig(
            head_dim=head_dim,
            max_position_embeddings=config.max_position_embeddings,
            parameters=config.rope_parameters,
        ),
        "windows": (None,) * layers,
        "rotary_layers": (True,) * layers,
        "hidden_act": config.hidden_act,
        "tie_word_embeddings": config.tie_word_embeddings,
    }
    return DecoderConfig(**(fields | options))


def _windows(config: Any) -> tuple[int | None, ...]:
    return tuple(
        config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types
    )
