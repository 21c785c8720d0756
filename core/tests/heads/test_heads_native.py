"""What is known of native families without torch is what their configs read as with transformers."""

from __future__ import annotations

import subprocess
import sys

import pytest
from specdecode.heads.native import FAMILIES
from specdecode.models import decoder_config


def config_of(architecture, **said):
    """As transformers reads a config that says its sizes alone, and ``said``."""
    from transformers import AutoConfig

    model_type = {"MiMoForCausalLM": "qwen2", "Qwen3MoeForCausalLM": "qwen3_moe"}.get(
        architecture, architecture.removesuffix("ForCausalLM").lower()
    )
    sizes = {"vocab_size": 32, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 32}
    return AutoConfig.for_model(model_type, **sizes, **said)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_what_configs_leave_out(architecture):
    family, config = FAMILIES[architecture], decoder_config(config_of(architecture), architecture)
    assert config.num_kv_heads == (family.num_kv_heads or 32)
    assert config.head_dim == (family.head_dim or 8)
    assert config.tie_word_embeddings == family.tied
    biases = (config.qkv_bias, config.out_bias, config.mlp_bias)
    assert biases == (bool(family.qkv_bias), bool(family.out_bias), bool(family.mlp_bias))
    assert config.qk_norm == family.qk_norm


@pytest.mark.parametrize("architecture", FAMILIES)
def test_what_configs_say(architecture):
    family = FAMILIES[architecture]
    read = config_of(architecture, num_key_value_heads=2, attention_bias=True, mlp_bias=True)
    config = decoder_config(read, architecture)
    assert config.num_kv_heads == 2
    assert config.qkv_bias == (family.qkv_bias is not False)
    assert config.out_bias == (family.out_bias is not False)
    assert config.mlp_bias == (family.mlp_bias is not False)
    assert all(config.rotary_layers) is not family.some_unrotated


def test_it_is_read_without_torch():
    code = "import sys, specdecode.heads.native, specdecode.heads.fields; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
