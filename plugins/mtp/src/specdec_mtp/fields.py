"""What configs say of the layers: the target's, and a speculators checkpoint's of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from specdecode.contract import CheckpointInfo, ConfigError, TargetInfo, Unsupported
from specdecode.heads.fields import activation, positive, proposed_tokens, rope_parameters

#: Model types whose layers are the native decoder's.
_PLAIN = ("llama", "mistral", "qwen2", "qwen3", "mimo", "smollm3")
_ANNOUNCED = "num_nextn_predict_layers"
_RECURRENT = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")


@attrs.frozen(kw_only=True)
class BlockFields:
    """Of a layer of the native decoder, what its tensors do not tell."""

    num_heads: int
    head_dim: int | None
    hidden_act: str
    rope: Mapping[str, Any] = attrs.field(repr=False)
    max_positions: int


@attrs.frozen(kw_only=True)
class Fields:
    """What a checkpoint says beside its tensors."""

    announced: int  #: modules
    proposed_tokens: int | None  #: draft tokens a step that a speculators checkpoint proposes
    rms_norm_eps: float
    block: BlockFields | None  #: None: transformers' code makes the layer


def read_fields(checkpoint: CheckpointInfo, target: TargetInfo, where: str) -> Fields:
    """Read and judge: a layer is as the target's config has it, or as ``transformer_layer_config`` does.

    Raises:
        Unsupported: a kind of layer that is not built; names it.
        ConfigError: a field that cannot be, or of another target.
    """
    top = checkpoint.config
    layer = dict(target.config)
    if kind := top.get("speculators_model_type"):
        if kind != "mtp":
            raise Unsupported(f"{where}: speculators_model_type {kind!r} is another method's, not 'mtp'")
        nested = top.get("transformer_layer_config")
        if not isinstance(nested, Mapping):
            raise ConfigError(f"{where}: its config.json lacks transformer_layer_config")
        _check_type(nested.get("model_type", "llama"), where)
        layer |= nested
        if "rope_theta" in nested or "rope_scaling" in nested:
            layer["rope_parameters"] = nested.get("rope_parameters") or {}
    for field in ("hidden_size", "vocab_size"):
        said = top.get(field) or (layer.get(field) if kind else None)
        if said not in (None, getattr(target, field)):
            raise ConfigError(
                f"{where} was made for another target: {field} of its config.json is {said}, "
                f"the target's is {getattr(target, field)}"
            )
    return Fields(
        announced=(top.get(_ANNOUNCED) and positive(top, _ANNOUNCED, where)) or 0,  # 0 may be said
        proposed_tokens=proposed_tokens(top),
        rms_norm_eps=float(layer.get("rms_norm_eps", 1e-6)),
        block=_block(layer, target, where) if kind or target.native else None,
    )


def _check_type(model_type: str, where: str) -> None:
    if model_type in _RECURRENT:
        raise Unsupported(
            f"{where} was made of {model_type}: the linear-attention layers of such a target keep a "
            "recurrent state, which cannot be rolled back when drafts are rejected"
        )
    if model_type not in _PLAIN:
        raise Unsupported(
            f"{where}: layers of model_type {model_type!r} are not supported in the speculators format; "
            f"{', '.join(_PLAIN)} are"
        )


def _block(layer: Mapping[str, Any], target: TargetInfo, where: str) -> BlockFields:
    head_dim = layer.get("head_dim")
    return BlockFields(
        num_heads=positive(layer, "num_attention_heads", where) or target.num_heads,
        head_dim=head_dim if type(head_dim) is int else None,
        hidden_act=activation(layer, where),
        rope=rope_parameters(layer, where),
        max_positions=positive(layer, "max_position_embeddings", where) or target.max_model_len,
    )
