"""The families that the native decoder runs, as their ``config.json`` tells them apart. No torch here."""

from __future__ import annotations

from typing import Literal

import attrs


@attrs.frozen(kw_only=True)
class Mixture:
    """How the configs of a family tell of their mixtures of experts, which take the place of MLPs."""

    size: str = "intermediate_size"  #: the key of an expert's inner size
    normalized: bool | None = (
        True  #: weights of a token's experts add up to 1; None: ``norm_topk_prob`` says it
    )
    some_dense: bool = False  #: ``mlp_only_layers`` and ``decoder_sparse_step`` leave layers their MLP


@attrs.frozen(kw_only=True)
class Family:
    """What the layers of a family have, and what its configs mean where they leave something out.

    A bias is always there (True), never (False), or where the config says so (None).
    """

    qkv_bias: bool | None = None  #: None: ``attention_bias`` says it
    out_bias: bool | None = None  #: of the attention's output projection; None: ``attention_bias`` says it
    mlp_bias: bool | None = False  #: None: ``mlp_bias`` says it
    qk_norm: bool = False  #: RMS norm of each query and key head before the rotation
    windows: Literal["none", "all", "layers"] = (
        "none"  #: sliding ones: no layer, all, as ``layer_types`` has it
    )
    some_unrotated: bool = False  #: ``no_rope_layers`` says which layers rotate
    num_kv_heads: int | None = None  #: where the config names none; None: as many as of queries
    head_dim: int | None = None  #: where the config names none; None: the heads share the hidden size
    mixture: Mixture | None = None
    tied: bool = False  #: where the config does not say ``tie_word_embeddings``


_QWEN2 = Family(qkv_bias=True, out_bias=False, windows="layers", num_kv_heads=32)

#: ``architectures[0]`` of a config -> its family.
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(mlp_bias=None),  # and the many that call themselves so (SmolLM among them)
    "MiMoForCausalLM": _QWEN2,  # but for its multi-token-prediction layers
    "MistralForCausalLM": Family(qkv_bias=False, out_bias=False, windows="all", num_kv_heads=8),
    "MixtralForCausalLM": Family(
        qkv_bias=False, out_bias=False, windows="all", num_kv_heads=8, mixture=Mixture()
    ),
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": Family(qk_norm=True, windows="layers", num_kv_heads=32, head_dim=128),
    "Qwen3MoeForCausalLM": Family(
        qk_norm=True,
        windows="all",
        num_kv_heads=4,
        mixture=Mixture(size="moe_intermediate_size", normalized=None, some_dense=True),
    ),
    "SmolLM3ForCausalLM": Family(
        mlp_bias=None, windows="layers", some_unrotated=True, num_kv_heads=4, tied=True
    ),
}
