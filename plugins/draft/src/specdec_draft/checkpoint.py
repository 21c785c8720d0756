"""What a draft checkpoint is, and what is wrong with it, told by its config and headers, without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
from specdecode.contract import CheckpointInfo, ConfigError, Unsupported

#: Architectures of the native decoder -> the KV heads and tying that their configs leave out.
_NATIVE: dict[str, tuple[int | None, bool]] = {
    "LlamaForCausalLM": (None, False),
    "MistralForCausalLM": (8, False),
    "Qwen2ForCausalLM": (32, False),
    "Qwen3ForCausalLM": (32, False),
    "SmolLM3ForCausalLM": (4, True),
}
_ACTIVATIONS = ("silu", "swish", "gelu_pytorch_tanh")
_ROPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
#: Rope types whose ``factor`` lengthens the context that the config names.
_LENGTHENING = ("linear", "yarn")
_SHOWN = 4


@attrs.frozen(kw_only=True)
class DraftShape:
    """What core has to know of a draft before it is loaded."""

    layers: int
    heads: int  #: of keys and values
    head_dim: int
    vocab_size: int
    context: int  #: tokens that it was made for
    native: bool  #: run by the native decoder, else by transformers' code


def describe(checkpoint: CheckpointInfo) -> DraftShape:
    """The shape of a draft, checked against its headers as far as the native families go.

    Another architecture of transformers is described by core, which runs its code without weights.

    Raises:
        Unsupported, ConfigError: what the config or the tensors lack.
    """
    config = checkpoint.config
    if stored := config.get("quantization_config"):
        method = stored.get("quant_method") if isinstance(stored, Mapping) else stored
        raise Unsupported(
            f"the draft {checkpoint.path} is quantized ({method}), which is not supported; use an "
            "unquantized checkpoint of it, or a GGUF file"
        )
    architecture = _architecture(config)
    if architecture not in _NATIVE:
        return _foreign(checkpoint)
    heads_of_kv, tied = _NATIVE[architecture]
    sizes = {name: _size(checkpoint, name) for name in _SIZES}
    heads = sizes["num_attention_heads"]
    shape = DraftShape(
        layers=sizes["num_hidden_layers"],
        heads=config.get("num_key_value_heads") or heads_of_kv or heads,
        head_dim=config.get("head_dim") or _head_dim(architecture, sizes),
        vocab_size=sizes["vocab_size"],
        context=_context(checkpoint),
        native=True,
    )
    if (activation := config.get("hidden_act", "silu")) not in _ACTIVATIONS:
        raise Unsupported(
            f"hidden_act {activation!r} of the draft {checkpoint.path} is not supported; "
            f"known are {', '.join(_ACTIVATIONS)}"
        )
    _check_tensors(checkpoint, shape, sizes, tied=config.get("tie_word_embeddings", tied))
    return shape


_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def looks_like_a_language_model(checkpoint: CheckpointInfo) -> str | None:
    """Why a checkpoint is a whole causal language model, no head beside a target; None: it is not."""
    architecture = _architecture(checkpoint.config)
    names = {name.removeprefix("model.") for name in checkpoint.tensors}
    whole = {"embed_tokens.weight", "norm.weight", "layers.0.input_layernorm.weight"} <= names
    if architecture not in _NATIVE or not whole or "fc.weight" in names:
        return None
    return f"a whole {architecture}"


def _architecture(config: Mapping[str, Any]) -> str | None:
    named = config.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else None


def _size(checkpoint: CheckpointInfo, name: str) -> int:
    value = checkpoint.config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(
            f"{name} in the config.json of the draft {checkpoint.path} must be a whole number of at least 1, "
            f"got {value!r}; is it the config of a causal language model?"
        )
    return value


def _head_dim(architecture: str, sizes: Mapping[str, int]) -> int:
    return 128 if architecture == "Qwen3ForCausalLM" else sizes["hidden_size"] // sizes["num_attention_heads"]


def _context(checkpoint: CheckpointInfo) -> int:
    trained = _size(checkpoint, "max_position_embeddings")
    rope = checkpoint.config.get("rope_parameters") or checkpoint.config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in _ROPES:
        raise Unsupported(
            f"rope type {kind!r} of the draft {checkpoint.path} is not supported; "
            f"known are {', '.join(_ROPES)}"
        )
    if kind not in _LENGTHENING:
        return trained
    original = rope.get("original_max_position_embeddings") or trained
    return max(trained, int(original * (rope.get("factor") or 1.0)))


def _foreign(checkpoint: CheckpointInfo) -> DraftShape:
    import torch  # heavy, and the one way to learn it
    from specdecode.models import describe_target, resolve_max_model_len, resolve_model

    files = resolve_model(checkpoint.path)
    context = resolve_max_model_len(None, files.hf_config)
    info = describe_target(files, dtype=torch.float32, device=torch.device("cpu"), max_model_len=context)
    return DraftShape(
        layers=info.num_layers,
        heads=info.num_kv_heads,
        head_dim=info.head_dim,
        vocab_size=info.vocab_size,
        context=context,
        native=False,
    )


def _check_tensors(
    checkpoint: CheckpointInfo, shape: DraftShape, sizes: Mapping[str, int], *, tied: bool
) -> None:
    """Every tensor that the native decoder will ask for is there, in the shape that the config says."""
    stored = {name.removeprefix("model."): info.shape for name, info in checkpoint.tensors.items()}
    missing: list[str] = []
    misshapen: list[str] = []
    for name, expected in _tensors(checkpoint.config, shape, sizes, tied=tied):
        if name not in stored:
            missing.append(name)
        elif stored[name] != expected:
            misshapen.append(f"{name} is {list(stored[name])} instead of {list(expected)}")
    for what, found in (("lacks", missing), ("does not fit its config.json:", misshapen)):
        if found:
            shown = ", ".join(found[:_SHOWN]) + (", ..." if len(found) > _SHOWN else "")
            raise ConfigError(
                f"the draft {checkpoint.path} {what} {shown} ({len(found)} tensors); fetch it again, or see "
                "whether config.json is its own"
            )


def _tensors(
    config: Mapping[str, Any], shape: DraftShape, sizes: Mapping[str, int], *, tied: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names, without the prefix ``model.``, and shapes."""
    architecture = _architecture(config)
    vocab, hidden, mlp = sizes["vocab_size"], sizes["hidden_size"], sizes["intermediate_size"]
    queries, keys = sizes["num_attention_heads"] * shape.head_dim, shape.heads * shape.head_dim
    biased = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM", "SmolLM3ForCausalLM")
    out_bias = biased and bool(config.get("attention_bias"))
    in_bias = out_bias or architecture == "Qwen2ForCausalLM"
    mlp_bias = architecture in ("LlamaForCausalLM", "SmolLM3ForCausalLM") and bool(config.get("mlp_bias"))
    yield "embed_tokens.weight", (vocab, hidden)
    for layer in range(shape.layers):
        for name, size, inputs, bias in (
            ("self_attn.q_proj", queries, hidden, in_bias),
            ("self_attn.k_proj", keys, hidden, in_bias),
            ("self_attn.v_proj", keys, hidden, in_bias),
            ("self_attn.o_proj", hidden, queries, out_bias),
            ("mlp.gate_proj", mlp, hidden, mlp_bias),
            ("mlp.up_proj", mlp, hidden, mlp_bias),
            ("mlp.down_proj", hidden, mlp, mlp_bias),
        ):
            yield f"layers.{layer}.{name}.weight", (size, inputs)
            if bias:
                yield f"layers.{layer}.{name}.bias", (size,)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"layers.{layer}.{name}.weight", (hidden,)
        if architecture == "Qwen3ForCausalLM":
            for name in ("q_norm", "k_norm"):
                yield f"layers.{layer}.self_attn.{name}.weight", (shape.head_dim,)
    yield "norm.weight", (hidden,)
    if not tied:
        yield "lm_head.weight", (vocab, hidden)
