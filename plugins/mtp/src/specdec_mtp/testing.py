"""Tiny targets with multi-token-prediction layers in every layout, for tests: exact names and fields.

Random weights, but arranged so that the logits follow from the last token's embedding, in target and layers
alike: drafts are accepted now and then.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from specdecode.heads.files import write_checkpoint
from specdecode.heads.untrained import STD, RandomWeights, altered, speculators_config
from specdecode.models import load_weights

#: Layout -> what its targets are published as.
TARGETS = {
    "mimo": "MiMoForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",  # GLM-4.5 and 4.6
    "deepseek_v3": "DeepseekV3ForCausalLM",  # V3, V3.1, R1
}
#: Layouts of the layers alone.
ALONE = ("mimo", "speculators")

Tensors = dict[str, torch.Tensor]


def write_target(
    path: str | Path,
    layout: str = "mimo",
    *,
    modules: int = 1,
    seed: int = 0,
    output_scale: float = 0.2,
    drop: tuple[str, ...] = (),
    tensors: Mapping[str, torch.Tensor] | None = None,
    **config: Any,
) -> Path:
    """Write a target of 2 layers and hidden size 64 with its modules; equal arguments, equal files.

    Args:
        path: directory, made if it is not there.
        layout: a key of :data:`TARGETS`.
        modules: multi-token-prediction layers.
        output_scale: of what layers add to the residual stream.
        drop: names of tensors to leave out.
        tensors: further tensors, or others.
        config: further fields of ``config.json``; None takes one out.

    Returns:
        ``path``.
    """
    random = RandomWeights(seed)
    fields = _SHARED | _CONFIGS[layout] | {"num_nextn_predict_layers": modules}
    held = _body(layout, fields, random, output_scale)
    for number in range(modules):
        held |= _module(layout, fields, number, random, output_scale, held)
    return write_checkpoint(path, fields | config, altered(held, tensors, drop))


def write_modules(
    path: str | Path,
    target: str | Path,
    layout: str = "mimo",
    *,
    modules: int = 1,
    seed: int = 0,
    output_scale: float = 0.2,
    drop: tuple[str, ...] = (),
    tensors: Mapping[str, torch.Tensor] | None = None,
    **config: Any,
) -> Path:
    """Write the layers alone, for a target of a native family; see :func:`write_target`.

    Args:
        target: checkpoint of the model that they are for.
        layout: one of :data:`ALONE`.
    """
    held = dict(load_weights(target))
    fields = json.loads((Path(target) / "config.json").read_text("utf-8"))
    random = RandomWeights(seed + 1)
    made: Tensors = {}
    for number in range(modules):
        made |= _module(layout, fields, number, random, output_scale, held)
    fields |= {"num_nextn_predict_layers": modules}
    if layout == "speculators":
        fields = _speculators(fields, modules)
    return write_checkpoint(path, fields | config, altered(made, tensors, drop))


_SHARED: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "mimo": {
        "architectures": ["MiMoForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_mimo.MiMoConfig",
            "AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM",
        },
        "model_type": "mimo",
        "attention_bias": True,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_window_layers": 2,
        "sliding_window": None,
        "use_sliding_window": False,
        "use_mrope": False,
    },
    "glm4_moe": _EXPERTS
    | {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "attention_bias": True,
        "use_qk_norm": True,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "partial_rotary_factor": 0.5,
        "routed_scaling_factor": 1.0,
    },
    "deepseek_v3": _EXPERTS
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "attention_bias": False,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 24,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "ep_size": 1,
    },
}


def _body(layout: str, fields: Mapping[str, Any], random: RandomWeights, output_scale: float) -> Tensors:
    """A model but for its modules."""
    hidden, vocab = fields["hidden_size"], fields["vocab_size"]
    held = {
        "model.embed_tokens.weight": random.normal(vocab, hidden),
        "model.norm.weight": random.norm(hidden),
        "lm_head.weight": random.normal(vocab, hidden, std=8 * STD),
    }
    for layer in range(fields["num_hidden_layers"]):
        dense = layer < fields.get("first_k_dense_replace", fields["num_hidden_layers"])
        block = _attention(layout, fields, random, output_scale)
        block |= (
            _mlp(fields, random, output_scale, "mlp.") if dense else _experts(fields, random, output_scale)
        )
        held |= {f"model.layers.{layer}.{name}": tensor for name, tensor in block.items()}
    return held


def _module(
    layout: str,
    fields: Mapping[str, Any],
    number: int,
    random: RandomWeights,
    output_scale: float,
    body: Mapping[str, torch.Tensor],
) -> Tensors:
    """One module whose logits follow from its own token's embedding as the target's do."""
    hidden = fields["hidden_size"]
    parts = {
        "embedding": random.norm(hidden),
        "hidden": random.norm(hidden),
        "final": body["model.norm.weight"] + random.normal(hidden),
    }
    halves = [torch.eye(hidden) + random.normal(hidden, hidden), random.normal(hidden, hidden)]
    joined = torch.cat(halves[::-1] if layout == "mimo" else halves, dim=1)
    block = _attention(layout, fields, random, output_scale)
    if layout in ("glm4_moe", "deepseek_v3"):
        block |= _experts(fields, random, output_scale)
        names = {
            "embedding": "enorm",
            "hidden": "hnorm",
            "final": "shared_head.norm",
            "projection": "eh_proj",
        }
        prefix = f"model.layers.{fields['num_hidden_layers'] + number}."
        if layout == "deepseek_v3":
            block |= {
                "embed_tokens.weight": body["model.embed_tokens.weight"].clone(),
                "shared_head.head.weight": body["lm_head.weight"].clone(),
            }
    else:
        block |= _mlp(fields, random, output_scale, "mlp.")
        names = {"embedding": "token_layernorm", "hidden": "hidden_layernorm", "final": "final_layernorm"}
        names["projection"] = "input_proj"
        prefix = f"{'' if layout == 'speculators' else 'model.'}mtp_layers.{number}."
    around = {f"{names[part]}.weight": tensor for part, tensor in {**parts, "projection": joined}.items()}
    return {prefix + name: tensor for name, tensor in {**around, **block}.items()}


def _attention(layout: str, fields: Mapping[str, Any], random: RandomWeights, output_scale: float) -> Tensors:
    """Attention and the two norms of a layer; scores are of such a size that positions matter."""
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    held = {
        "input_layernorm.weight": random.norm(hidden),
        "post_attention_layernorm.weight": random.norm(hidden),
    }
    if layout == "deepseek_v3":
        nope, rope, value = (fields[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        low, latent = fields["q_lora_rank"], fields["kv_lora_rank"]
        shapes = {
            "q_a_proj": (low, hidden),
            "q_b_proj": (heads * (nope + rope), low),
            "kv_a_proj_with_mqa": (latent + rope, hidden),
            "kv_b_proj": (heads * (nope + value), latent),
            "o_proj": (hidden, heads * value),
        }
        norms = {"q_a_layernorm": low, "kv_a_layernorm": latent}
    else:
        size = fields.get("head_dim") or hidden // heads
        keys = fields["num_key_value_heads"] * size
        shapes = {"q_proj": (heads * size, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden)}
        shapes["o_proj"] = (hidden, heads * size)
        norms = {"q_norm": size, "k_norm": size} if fields.get("use_qk_norm") else {}
        held |= {
            f"self_attn.{name}.bias": random.normal(shapes[name][0])
            for name in ("q_proj", "k_proj", "v_proj")
            if fields.get("attention_bias") or fields["model_type"] in ("mimo", "qwen2")
        }
    for name, shape in shapes.items():
        scale = output_scale if name == "o_proj" else 5.0 if name != "v_proj" else 1.0
        held[f"self_attn.{name}.weight"] = random.normal(*shape) * scale
    return held | {f"self_attn.{name}.weight": random.norm(size) for name, size in norms.items()}


def _mlp(
    fields: Mapping[str, Any],
    random: RandomWeights,
    output_scale: float,
    prefix: str,
    size: int | None = None,
) -> Tensors:
    hidden, size = fields["hidden_size"], size or fields["intermediate_size"]
    return {
        f"{prefix}gate_proj.weight": random.normal(size, hidden, std=0.1),
        f"{prefix}up_proj.weight": random.normal(size, hidden, std=0.1),
        f"{prefix}down_proj.weight": random.normal(hidden, size, std=0.1) * output_scale,
    }


def _experts(fields: Mapping[str, Any], random: RandomWeights, output_scale: float) -> Tensors:
    size, count = fields["moe_intermediate_size"], fields["n_routed_experts"]
    held = {
        "mlp.gate.weight": random.normal(count, fields["hidden_size"], std=0.2),
        "mlp.gate.e_score_correction_bias": random.normal(count, std=0.1),
    }
    for expert in range(count):
        held |= _mlp(fields, random, output_scale, f"mlp.experts.{expert}.", size)
    return held | _mlp(fields, random, output_scale, "mlp.shared_experts.", size)


def _speculators(model: Mapping[str, Any], modules: int) -> dict[str, Any]:
    left_out = ("architectures", "num_nextn_predict_layers", "transformers_version")
    return {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        "speculators_version": "0.3.0",
        "num_nextn_predict_layers": modules,
        "transformer_layer_config": {key: value for key, value in model.items() if key not in left_out},
        "speculators_config": speculators_config("mtp", model["architectures"]),
    }
