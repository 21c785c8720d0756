"""The tensors of a head of which there is a config alone: what is timed with random weights."""

from __future__ import annotations

from specdecode.contract import CheckpointInfo, ConfigError, TargetInfo, TensorInfo

from .fields import Fields


def dummy_tensors(
    fields: Fields, target: TargetInfo, checkpoint: CheckpointInfo, *, eagle3: bool
) -> dict[str, TensorInfo]:
    """Canonical name -> header, as the authors' releases have them.

    Embeddings are the target's where the hidden sizes agree, and so is EAGLE's output layer.

    Raises:
        ConfigError: the config says too little.
    """
    layer = checkpoint.config.get("transformer_layer_config") or checkpoint.config
    hidden, inner = fields.hidden_size, layer.get("intermediate_size")
    if hidden is None or type(inner) is not int:
        raise ConfigError(
            f"the config.json of {checkpoint.path} lacks hidden_size or intermediate_size, which a head of "
            "random weights is made by"
        )
    dim = fields.head_dim or hidden // fields.num_heads
    queries, keys = fields.num_heads * dim, (layer.get("num_key_value_heads") or fields.num_heads) * dim
    shapes: dict[str, tuple[int, ...]] = {}
    if not eagle3:
        shapes["fc.weight"] = (hidden, 2 * hidden)
    elif fields.use_aux:
        shapes["fc.weight"] = (hidden, len(fields.aux_layer_ids or (0, 0, 0)) * target.hidden_size)
    for index in range(fields.num_layers):
        inputs = 2 * hidden if eagle3 and index == 0 else hidden
        for name, rows, columns in (
            ("self_attn.q_proj", queries, inputs),
            ("self_attn.k_proj", keys, inputs),
            ("self_attn.v_proj", keys, inputs),
            ("self_attn.o_proj", hidden, queries),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            shapes[f"layers.{index}.{name}.weight"] = (rows, columns)
        shapes[f"layers.{index}.post_attention_layernorm.weight"] = (hidden,)
        if eagle3 or index:
            shapes[f"layers.{index}.input_layernorm.weight"] = (hidden,)
    if eagle3:
        drafted = fields.draft_vocab_size or target.vocab_size
        shapes |= {"layers.0.hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
        shapes["lm_head.weight"] = (drafted, hidden)
        if drafted < target.vocab_size:
            shapes["d2t"] = (drafted,)
        if hidden != target.hidden_size:
            shapes["embed_tokens.weight"] = (target.vocab_size, hidden)
    return {name: TensorInfo(shape, target.dtype) for name, shape in shapes.items()}
