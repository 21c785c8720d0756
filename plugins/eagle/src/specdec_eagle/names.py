"""One name for each tensor, whoever published the checkpoint; and the layouts that are refused by theirs.

The names are those of the authors' releases with ``layers.0`` for ``midlayer``. ``speculators`` names differ
for EAGLE (``fusion_fc``, ``transformer``), as do those of heads with norms of their own (HASS).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from specdecode.contract import ConfigError, Unsupported

_PREFIXES = {
    "midlayer.": "layers.0.",
    "transformer.": "layers.0.",
    "fusion_fc.": "fc.",
    "embed_layernorm.": "embedding_layernorm.",
    "hidden_layernorm.": "layers.0.input_layernorm.",
    "lm_head_layernorm.": "pre_lm_head_layernorm.",
}

#: Behind the first layer some name the norm before attention otherwise.
_LATER_NORM = re.compile(r"^layers\.([1-9]\d*)\.hidden_norm\.")

#: Stored beside the weights, and of no use to a drafter.
_IGNORED = re.compile(r"^verifier_|rotary_emb\.inv_freq$")

_REFUSED = (
    (r"self_attn\.(q_a_|q_b_|kv_a_|kv_b_)", "multi-head latent attention (DeepSeek, Kimi)"),
    (r"self_attn\.[qk]_norm\.", "norms on query and key heads (Eagle3Qwen3ForCausalLM)"),
    (r"^mask_(hidden|embedding)", "parallel drafting (P-EAGLE)"),
    (r"mlp\.(experts|gate|router)\.", "a mixture of experts"),
    (r"\.(qkv_proj|gate_up_proj)\.", "fused projections, which must be stored apart"),
    (r"(qweight|qzeros|weight_scale|weight_packed|scale_inv)", "quantized weights"),
)


def canonical(name: str) -> str:
    """The one name of a stored tensor."""
    name = name.removeprefix("model.")
    for old, new in _PREFIXES.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return _LATER_NORM.sub(r"layers.\1.input_layernorm.", name)


def canonical_names(stored: Iterable[str], where: str) -> dict[str, str]:
    """Canonical name -> stored name.

    Raises:
        Unsupported: a tensor belongs to a variant that is not built; names it.
        ConfigError: two tensors have one meaning.
    """
    names: dict[str, str] = {}
    for name in sorted(stored):
        for pattern, variant in _REFUSED:
            if re.search(pattern, name.removeprefix("model.")):
                raise Unsupported(
                    f"{where} has {variant}, which is not supported: it holds the tensor {name}"
                )
        if _IGNORED.search(name):
            continue
        if other := names.get(canonical(name)):
            raise ConfigError(f"{where} holds {other} and {name}, which mean the same; keep one")
        names[canonical(name)] = name
    return names
