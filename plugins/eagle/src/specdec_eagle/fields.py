"""What a head's ``config.json`` says, in the authors' form, vLLM's older one and the speculators format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from specdecode.contract import CheckpointInfo, ConfigError, Unsupported
from specdecode.heads.fields import activation, positive, proposed_tokens, rope_parameters

#: ``speculators_model_type`` -> whether it is an EAGLE head, or what it is.
_OTHER_SPECULATORS = {
    "peagle": "parallel drafting (P-EAGLE)",
    "mtp": "multi-token prediction",
    "dflash": "DFlash",
    "dspark": "DSpark",
    "mlp": "an MLP speculator",
    "independent": "a draft model",
}
_REFUSED_ARCHITECTURES = {
    "Eagle3DeepseekV2ForCausalLM": "multi-head latent attention",
    "Eagle3Qwen3ForCausalLM": "norms on query and key heads",
}
#: The export template of NVIDIA's Model-Optimizer -> what is built.
_EAGLE_CONFIG = {
    "use_aux_hidden_state": (True, False),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "next_layer_regular": (True,),
    "parallel_draft_step": (0, 1),
}
_NORM_FLAGS = (
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "layernorms",
    "fusion_bias",
)
_ANNOUNCED = {
    "norm_before_fc": ("input_norm.weight",),
    "fusion_bias": ("fc.bias",),
    "layernorms": (
        "embedding_layernorm.weight",
        "layers.0.input_layernorm.weight",
        "pre_lm_head_layernorm.weight",
    ),
}
#: Of the speculators format, beside the norm flags.
_SPECULATORS_KEYS = {
    "architectures", "auto_map", "draft_vocab_size", "dtype", "eagle_aux_hidden_state_layer_ids",
    "embed_requires_grad", "has_no_defaults_at_init", "model_type", "speculators_config",
    "speculators_model_type", "speculators_version", "target_hidden_size", "tie_word_embeddings",
    "torch_dtype", "transformer_layer_architecture", "transformer_layer_config", "transformers_version",
}  # fmt: skip
#: In the authors' form a config is a whole Llama config: only what looks like a switch of a head is judged.
_SWITCHES = ("norm_", "_norm", "layernorm", "parallel_draft", "ttt_", "aux_hidden")
_LLAMA_KEYS = {"rms_norm_eps", "layer_norm_eps", "eagle_aux_hidden_state_layer_ids", "norm_eps"}


@attrs.frozen(kw_only=True)
class Fields:
    """The fields that a head's tensors do not tell."""

    num_heads: int
    head_dim: int | None
    num_layers: int
    hidden_size: int | None
    rms_norm_eps: float
    hidden_act: str
    rope: Mapping[str, Any]
    max_positions: int
    vocab_size: int | None  #: of the target
    draft_vocab_size: int | None  #: None: the target's
    target_hidden_size: int | None
    aux_layer_ids: tuple[int, ...] | None
    use_aux: bool
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    announced: tuple[str, ...]  #: canonical names of tensors that switches of config.json promise
    proposed_tokens: int | None  #: draft tokens a step that the checkpoint asks for


def read_fields(
    checkpoint: CheckpointInfo, where: str, method: str, rope: Mapping[str, Any] | None
) -> Fields:
    """Read and judge ``config.json``.

    Args:
        where: what messages call the checkpoint.
        method: "eagle" or "eagle3".
        rope: instead of the checkpoint's rope fields.

    Raises:
        Unsupported: a variant or a switch that is not built; names it.
        ConfigError: a field that cannot be.
    """
    top = dict(checkpoint.config)
    speculators = "speculators_model_type" in top
    nested = top.get("transformer_layer_config") if speculators else top.get("model")
    layer = dict(nested) if isinstance(nested, Mapping) else top
    eagle = top.get("eagle_config") or {}
    if not isinstance(eagle, Mapping):
        raise ConfigError(f"{where}: eagle_config of config.json must be an object, got {eagle!r}")
    _refuse_variants(top, eagle, where, speculators)
    hidden = positive(layer, "hidden_size", where)
    heads = positive(layer, "num_attention_heads", where) or 32
    ids = top.get("eagle_aux_hidden_state_layer_ids") or eagle.get("eagle_aux_hidden_state_layer_ids")
    if ids is not None and not (isinstance(ids, (list, tuple)) and all(type(i) is int for i in ids)):
        raise ConfigError(
            f"{where}: eagle_aux_hidden_state_layer_ids must be a list of integers, got {ids!r}"
        )
    before = top.get("norm_before_residual")
    if top.get("norm_before_fc") and top.get("fc_norm"):
        raise ConfigError(f"{where}: norm_before_fc and fc_norm exclude each other; config.json sets both")
    return Fields(
        num_heads=heads,
        head_dim=positive(layer, "head_dim", where),
        num_layers=positive(layer, "num_hidden_layers", where) or 1,
        hidden_size=hidden,
        rms_norm_eps=float(layer.get("rms_norm_eps", 1e-6)),
        hidden_act=activation(layer, where),
        rope=rope_parameters(layer if rope is None else {"rope_parameters": rope}, where),
        max_positions=positive(layer, "max_position_embeddings", where) or 2048,
        vocab_size=positive(layer, "vocab_size", where),
        draft_vocab_size=positive(top, "draft_vocab_size", where)
        or positive(top, "truncated_vocab_size", where),
        target_hidden_size=positive(top, "target_hidden_size", where),
        aux_layer_ids=None if ids is None else tuple(ids),
        use_aux=bool(eagle.get("use_aux_hidden_state", True)),
        # Where the speculators format does not say it, its readers take it for true.
        norm_before_residual=speculators and method == "eagle3" if before is None else bool(before),
        norm_before_fc=bool(top.get("norm_before_fc")),
        fc_norm=bool(top.get("fc_norm")),
        norm_output=bool(top.get("norm_output")),
        announced=tuple(name for switch, names in _ANNOUNCED.items() if top.get(switch) for name in names),
        proposed_tokens=proposed_tokens(top),
    )


def _refuse_variants(top: Mapping[str, Any], eagle: Mapping[str, Any], where: str, speculators: bool) -> None:
    kind = top.get("speculators_model_type")
    if speculators and kind not in ("eagle", "eagle3"):
        what = _OTHER_SPECULATORS.get(str(kind), "unknown")
        raise Unsupported(
            f"{where}: speculators_model_type {kind!r} is {what}, not an EAGLE head of this plugin"
        )
    for architecture in top.get("architectures") or ():
        if variant := _REFUSED_ARCHITECTURES.get(architecture):
            raise Unsupported(f"{where}: {architecture} has {variant}, which is not supported")
    for key, value in eagle.items():
        if key == "eagle_aux_hidden_state_layer_ids" or value is None:
            continue
        if key not in _EAGLE_CONFIG or value not in _EAGLE_CONFIG[key]:
            raise Unsupported(f"{where}: eagle_config.{key}={value!r} of config.json is not supported")
    for key, value in top.items():
        if not value or key in _NORM_FLAGS:
            continue
        if speculators:
            unknown = key not in _SPECULATORS_KEYS
        else:
            unknown = key not in _LLAMA_KEYS and any(part in key for part in _SWITCHES)
        if unknown:
            raise Unsupported(f"{where}: {key}={value!r} of config.json is unknown, and may change the head")
