"""A layer of a target's own kind, alone: what transformers' own layer gives, with weights of its own."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from specdecode.contract import ConfigError
from specdecode.models import TransformersLayer, resolve_model
from specdecode.testing.dense import DenseRow

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "pad_token_id": 0,
    "dtype": "float32",
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
}
#: Model type -> fields of its config; the last layer is not like the first.
MODELS = {
    "glm4_moe": {
        "num_key_value_heads": 2,
        "head_dim": 32,
        "first_k_dense_replace": 1,
        "attention_bias": True,
    },
    "glm4_moe_lite": LATENT,
    "deepseek_v3": LATENT
    | {"first_k_dense_replace": 2, "v_head_dim": 24},  # values of another size than keys
    "gemma3_text": {
        "num_key_value_heads": 2,
        "head_dim": 32,
        "sliding_window": 4,
        "layer_types": ["full_attention", "full_attention", "sliding_attention"],
    },
}


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    """A model of transformers, where it was saved, and its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(request.param, **(SHAPE | MODELS[request.param]))
    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
        for parameter in made.parameters():
            parameter.data += 0.08 * torch.randn_like(parameter)
    path = tmp_path_factory.mktemp(request.param)
    made.save_pretrained(path)
    weights = {
        name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    return made.eval(), path, weights


def layer_of(path, weights, **changes):
    prefix = "model.layers.2."
    own = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
    own = {name: tensor for name, tensor in (own | changes).items() if tensor is not None}
    kind = {"dtype": torch.float32, "device": torch.device("cpu"), "max_model_len": 64}
    return TransformersLayer(resolve_model(path), own, weights["model.norm.weight"], **kind)


@torch.inference_mode()
def test_it_is_the_models_last_layer_and_its_norm(model):
    """The stream that enters the last layer of the model gives what leaves it; all at once and one by one."""
    made, path, weights = model
    ids = torch.randint(3, 300, (1, 20), generator=torch.Generator().manual_seed(1))
    output = made.model(input_ids=ids, output_hidden_states=True)
    entering, wanted = output.hidden_states[-2][0], output.last_hidden_state[0]
    left = []
    made.model.layers[2].register_forward_hook(
        lambda _, __, out: left.append((out if isinstance(out, torch.Tensor) else out[0])[0])
    )
    made.model(input_ids=ids)
    layer = layer_of(path, weights)
    config = made.config
    keys = getattr(config, "qk_head_dim", None) or config.head_dim
    values = getattr(config, "v_head_dim", None) or keys
    row = DenseRow([(config.num_key_value_heads, keys, values)], 21, layer.decoder)
    positions = torch.arange(20)
    for parts in (positions.split(20), positions.split(1)):
        row.clear()
        found = [layer(entering[p], p, row.metadata(p, p + 1), row.caches[0]) for p in parts]
        states, stream = (torch.cat(pieces) for pieces in zip(*found, strict=True))
        torch.testing.assert_close(states, wanted, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(stream, left[0], atol=1e-5, rtol=1e-5)


def test_tensors_that_do_not_fit_are_refused(model):
    _, path, weights = model
    name = "self_attn.o_proj.weight"
    with pytest.raises(ConfigError, match=rf"lacks 1 tensors .*{name}"):
        layer_of(path, weights, **{name: None})
    with pytest.raises(ConfigError, match=r"has no place for 1 tensors .*surprise"):
        layer_of(path, weights, surprise=torch.zeros(2))
    with pytest.raises(ConfigError, match="cannot be made of these tensors"):
        layer_of(path, weights, **{name: torch.zeros(3, 3)})
