"""Tiny untrained heads in every public layout, for tests: exact names and fields, milliseconds to load.

Random weights, but arranged so that the logits follow from the last token's embedding: over a target whose
next token does too (``specdecode.testing.tiny``) drafts are accepted now and then.
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

#: Layout -> its method.
LAYOUTS = {
    "eagle": "eagle",  # yuhuili/EAGLE-*
    "eagle-norms": "eagle",  # HASS, and EAGLE with norms of its own
    "eagle-vllm": "eagle",  # old conversions for vLLM
    "eagle-speculators": "eagle",
    "eagle-speculators-norms": "eagle",
    "eagle3": "eagle3",  # yuhuili/EAGLE3-*, SpecForge
    "eagle3-speculators": "eagle3",  # RedHatAI/*-speculator.eagle3
}


def write_head(
    path: str | Path,
    layout: str,
    target: str | Path,
    *,
    draft_vocab: int | None = None,
    embed: bool = False,
    lm_head: bool | None = None,
    taps: int = 3,
    layers: int = 1,
    hidden_size: int | None = None,
    fc: bool = True,
    fc_bias: bool = False,
    input_norm: bool = False,
    fc_norm: bool = False,
    seed: int = 0,
    drop: tuple[str, ...] = (),
    tensors: Mapping[str, torch.Tensor] | None = None,
    **config: Any,
) -> Path:
    """Write the checkpoint of a head for ``target``; equal arguments, equal files.

    Args:
        path: directory, made if it is not there.
        layout: a key of :data:`LAYOUTS`.
        target: checkpoint of a model in Hugging Face's format.
        draft_vocab: rows of a reduced vocabulary (EAGLE-3), with ``d2t`` and ``t2d``.
        embed: whether a table of embeddings comes along.
        lm_head: whether an output layer does; None: as the layout has it.
        taps: hidden states that EAGLE-3 joins.
        layers: decoder layers.
        hidden_size: of the head; None: the target's.
        fc: whether EAGLE-3 has an ``fc``.
        fc_bias, input_norm, fc_norm: optional tensors.
        drop: names of tensors to leave out.
        tensors: further tensors, or others.
        config: further fields of the top level of ``config.json``; None takes one out.

    Returns:
        ``path``.
    """
    model = json.loads((Path(target) / "config.json").read_text("utf-8"))
    hidden = hidden_size or model["hidden_size"]
    eagle3 = LAYOUTS[layout] == "eagle3"
    random = RandomWeights(seed)
    joined = {"fc": fc, "bias": fc_bias, "input_norm": input_norm, "fc_norm": fc_norm}
    held = _projections(random, hidden, model["hidden_size"], taps if eagle3 else 0, **joined)
    held |= _body(random, layout, hidden, layers)
    held |= _tables(
        random,
        dict(load_weights(target)),
        hidden,
        embed=embed,
        lm_head=eagle3 if lm_head is None else lm_head,
        draft_vocab=draft_vocab,
        own_size=hidden_size is not None,
        eagle3=eagle3,
    )
    held = {_stored(layout, name): tensor for name, tensor in held.items()}
    fields = _config(layout, model, hidden, layers, draft_vocab, input_norm, fc_norm) | config
    return write_checkpoint(path, fields, altered(held, tensors, drop))


def _projections(
    random: RandomWeights,
    hidden: int,
    target_hidden: int,
    taps: int,
    *,
    fc: bool,
    bias: bool,
    input_norm: bool,
    fc_norm: bool,
) -> dict[str, torch.Tensor]:
    """What joins the inputs; ``taps``: of EAGLE-3, 0: of EAGLE."""
    held: dict[str, torch.Tensor] = {}
    if taps:
        if fc:
            held["fc.weight"] = random.normal(hidden, taps * target_hidden)
        held["norm.weight"] = random.norm(hidden)
    else:
        held["fc.weight"] = random.normal(hidden, 2 * hidden) + torch.eye(hidden, 2 * hidden)
    if bias:
        held["fc.bias"] = random.normal(hidden)
    if input_norm:
        held["input_norm.weight"] = random.norm(taps * target_hidden)
    if fc_norm:
        held |= {f"fc_norm.{tap}.weight": random.norm(target_hidden) for tap in range(taps)}
    return held


def _body(random: RandomWeights, layout: str, hidden: int, layers: int) -> dict[str, torch.Tensor]:
    """The layers and their norms."""
    held: dict[str, torch.Tensor] = {}
    eagle3, norms = LAYOUTS[layout] == "eagle3", layout.endswith("norms")
    for layer in range(layers):
        own = _layer(hidden, wide=eagle3 and layer == 0, normal=random.normal)
        held |= {f"layers.{layer}.{name}": tensor for name, tensor in own.items()}
        held[f"layers.{layer}.post_attention_layernorm.weight"] = random.norm(hidden)
        if eagle3 or norms or layer:
            held[f"layers.{layer}.input_layernorm.weight"] = random.norm(hidden)
    if eagle3:
        held["layers.0.hidden_norm.weight"] = random.norm(hidden)
    if norms:
        held["embedding_layernorm.weight"] = random.norm(hidden)
        held["pre_lm_head_layernorm.weight"] = random.norm(hidden)
    return held


def _tables(
    random: RandomWeights,
    weights: Mapping[str, torch.Tensor],
    hidden: int,
    *,
    embed: bool,
    lm_head: bool,
    draft_vocab: int | None,
    own_size: bool,
    eagle3: bool,
) -> dict[str, torch.Tensor]:
    """What has a row for each token: copies of the target's ``weights`` where their size allows it."""
    held: dict[str, torch.Tensor] = {}
    table = weights["model.embed_tokens.weight"]
    if embed:
        held["embed_tokens.weight"] = (
            random.normal(len(table), hidden) if own_size or eagle3 else table.clone()
        )
    if lm_head:
        rows = weights.get("lm_head.weight", table)
        held["lm_head.weight"] = random.normal(len(rows), hidden, std=8 * STD) if own_size else rows.clone()
    if draft_vocab is not None:
        kept = torch.randperm(len(table), generator=random.generator)[:draft_vocab].sort().values
        held["d2t"] = kept - torch.arange(draft_vocab)
        held["t2d"] = torch.zeros(len(table), dtype=torch.bool).index_fill_(0, kept, True)
        if lm_head:
            held["lm_head.weight"] = held["lm_head.weight"][kept].contiguous()
    return held


def _layer(hidden: int, *, wide: bool, normal: Any) -> dict[str, torch.Tensor]:
    """A layer whose tokens see themselves above all, and pass their own embedding on."""
    inputs = 2 * hidden if wide else hidden
    own = torch.eye(hidden, inputs)
    # A wide layer's inputs are normed; the others' are small, or their attention would not be seen.
    seeing, passing, std, spread = (2.0, 1.0, STD, STD) if wide else (0.0, 0.0, 1.0, 0.1)
    return {
        "self_attn.q_proj.weight": normal(hidden, inputs, std=std) + seeing * own,
        "self_attn.k_proj.weight": normal(hidden, inputs, std=std) + seeing * own,
        "self_attn.v_proj.weight": normal(hidden, inputs, std=spread) + passing * own,
        "self_attn.o_proj.weight": normal(hidden, hidden, std=spread) + passing * torch.eye(hidden),
        "mlp.gate_proj.weight": normal(2 * hidden, hidden, std=0.1),
        "mlp.up_proj.weight": normal(2 * hidden, hidden, std=0.1),
        "mlp.down_proj.weight": normal(hidden, 2 * hidden),
    }


def _stored(layout: str, name: str) -> str:
    if layout.startswith("eagle-speculators"):
        return name.replace("fc.", "fusion_fc.", 1).replace("layers.0.", "transformer.", 1)
    if layout == "eagle3":
        return name.replace("layers.0.", "midlayer.", 1)
    if layout == "eagle-norms":
        renamed = {
            "embedding_layernorm.weight": "embed_layernorm.weight",
            "pre_lm_head_layernorm.weight": "lm_head_layernorm.weight",
            "layers.0.input_layernorm.weight": "hidden_layernorm.weight",
        }
        return renamed.get(name, name)
    if layout == "eagle-vllm" and name.startswith(("layers.", "embed_tokens.")):
        return f"model.{name}"
    return name


def _config(
    layout: str,
    model: Mapping[str, Any],
    hidden: int,
    layers: int,
    draft_vocab: int | None,
    norm_before_fc: bool,
    fc_norm: bool,
) -> dict[str, Any]:
    layer = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": layers,
        "vocab_size": model["vocab_size"],
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
    }
    flags: dict[str, Any] = {}
    if LAYOUTS[layout] == "eagle3":
        flags = {"draft_vocab_size": draft_vocab or model["vocab_size"]}
        flags |= {"norm_before_fc": True} if norm_before_fc else {}
        flags |= {"fc_norm": True} if fc_norm else {}
        if hidden != model["hidden_size"]:
            flags["target_hidden_size"] = model["hidden_size"]
    if "speculators" in layout:
        kind = LAYOUTS[layout]
        fields: dict[str, Any] = {
            "architectures": ["Eagle3Speculator" if kind == "eagle3" else "EagleSpeculator"],
            "speculators_model_type": kind,
            "speculators_version": "0.1.0",
            "transformer_layer_config": layer,
            "speculators_config": speculators_config(kind, model["architectures"]),
        }
        if kind == "eagle":
            flags = {
                "transformer_layer_architecture": "LlamaDecoderLayer",
                "layernorms": layout.endswith("norms"),
            }
        else:
            flags["norm_before_residual"] = False
        return fields | flags
    if layout == "eagle-vllm":
        return {"architectures": ["EAGLEModel"], "model_type": "eagle", "model": layer}
    return {"architectures": ["LlamaForCausalLM"], **layer, **flags}
