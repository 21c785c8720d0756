"""Tiny checkpoints in Hugging Face format: seconds of work become milliseconds, with every real code path.

Random weights at a model's usual scale give almost flat logits, so the output layer is scaled up;
and with ``zero_outputs`` attention and MLP add nothing, so that the law of the next token depends
on the last token alone and is known exactly (such a model cannot see a corrupted KV cache):
:func:`table_checkpoint` writes one with a law of the test's choice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..contract import TargetInfo
from ..heads.untrained import STD, RandomWeights
from ..models import Decoder, TransformersDecoder, describe_target, load_model, load_weights, resolve_model

#: Family -> model type, architecture, and what its config has beside the shared shape.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "LlamaForCausalLM", {}),
    "mistral": ("mistral", "MistralForCausalLM", {"sliding_window": None}),
    "mixtral": ("mixtral", "MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("qwen2", "Qwen2ForCausalLM", {}),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", {"head_dim": 32}),  # heads * head_dim is not the hidden size
    "qwen3-moe": (
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
    "smollm": ("llama", "LlamaForCausalLM", {"tie_word_embeddings": True}),
    "smollm3": ("smollm3", "SmolLM3ForCausalLM", {"no_rope_layer_interval": 2, "tie_word_embeddings": False}),
}

PAD, BOS, EOS = 0, 1, 2
SPECIAL_TOKENS = ("<|pad|>", "<|im_start|>", "<|im_end|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def loaded(path: str | Path, *, max_model_len: int = 96) -> tuple[Decoder | TransformersDecoder, TargetInfo]:
    """The model of a checkpoint, on the CPU in float32, and what draft methods are told of it."""
    files, cpu = resolve_model(str(path)), torch.device("cpu")
    return (
        load_model(files, dtype=torch.float32, device=cpu, max_model_len=max_model_len),
        describe_target(files, dtype=torch.float32, device=cpu, max_model_len=max_model_len),
    )


def tiny_checkpoint(
    path: str | Path,
    family: str = "llama",
    *,
    seed: int = 0,
    vocab_size: int = 300,
    lm_head_scale: float = 8.0,
    output_scale: float = 1.0,
    zero_outputs: bool = False,
    shards: int = 1,
    tie: bool | None = None,
    generation: dict[str, Any] | None = None,
    **config_overrides: Any,
) -> Path:
    """Write a checkpoint of 2 layers, hidden size 64, 4 heads and 2 KV heads; equal arguments, equal files.

    Args:
        path: directory, made if it is not there.
        family: a key of :data:`FAMILIES`.
        seed: of the weights.
        vocab_size: ids 0 to 2 are pad, bos and eos; then come the 256 bytes (id = byte + 3), then
            ``<extra_N>`` tokens, which no text encodes to. A vocabulary too small for all bytes
            has those from ``a`` on.
        lm_head_scale: factor of the output layer's weights (of the whole table if it is tied).
        output_scale: factor of ``o_proj`` and ``down_proj``: the smaller, the more the next token
            follows from the last one alone.
        zero_outputs: ``output_scale=0``.
        shards: number of safetensors files, with an index if more than one.
        tie: ``tie_word_embeddings``; None: as the family has it.
        generation: fields of ``generation_config.json`` beside the ids.
        config_overrides: further fields of the Hugging Face config, e.g. ``num_hidden_layers``.

    Returns:
        ``path``.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    config = _config(family, vocab_size=vocab_size, tie=tie, overrides=config_overrides)
    config.save_pretrained(path)
    ids = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    _write_json(path / "generation_config.json", ids | (generation or {}))
    tensors = dict(
        _tensors(config, lm_head_scale, 0.0 if zero_outputs else output_scale, RandomWeights(seed))
    )
    _save(path, tensors, shards)
    _tokenizer(vocab_size, config.max_position_embeddings).save_pretrained(path)
    return path


def table_checkpoint(
    path: str | Path, logits: torch.Tensor | None = None, *, vocab_size: int = 300, **changes: Any
) -> Path:
    """Write a checkpoint whose next token depends on the last one alone, by a known law.

    ``o_proj`` and ``down_proj`` are zero. Such a model has no working attention: it cannot see a
    corrupted KV cache.

    Args:
        path: directory, made if it is not there.
        logits: ``[vocab, vocab]`` float: row ``i`` becomes, to float32's rounding, the logits behind
            token ``i``; its size is the vocabulary's. None: random weights, whose law
            :func:`table_logits` tells. :func:`favour` makes one.
        vocab_size: without ``logits``.
        changes: further arguments of :func:`tiny_checkpoint`.

    Returns:
        ``path``.
    """
    if logits is None:
        return tiny_checkpoint(path, vocab_size=vocab_size, zero_outputs=True, **changes)
    size = len(logits)
    if logits.shape != (size, size):
        raise ValueError(f"logits must be [vocab, vocab], got {tuple(logits.shape)}")
    hidden = -(-size // 16) * 16  # an even size for each of 4 heads
    path = tiny_checkpoint(
        path,
        vocab_size=size,
        zero_outputs=True,
        tie=False,
        hidden_size=hidden,
        intermediate_size=16,
        **changes,
    )
    tensors = dict(load_weights(path))
    # Token i is a unit vector times sqrt(hidden), so of RMS 1: the norms with weight 1 leave it as it is.
    tensors["model.embed_tokens.weight"] = torch.eye(size, hidden) * hidden**0.5
    tensors["model.norm.weight"] = torch.ones(hidden)
    head = torch.zeros(size, hidden)
    head[:, :size] = logits.float().T / hidden**0.5
    tensors["lm_head.weight"] = head
    _save(path, tensors, shards=1)
    return path


@torch.inference_mode()
def table_logits(path: str | Path) -> torch.Tensor:
    """``[vocab, vocab]`` float32: row ``i`` holds the logits behind token ``i`` of a table checkpoint."""
    path = Path(path)
    config, tensors = json.loads((path / "config.json").read_text("utf-8")), dict(load_weights(path))
    outputs = [
        w for name, w in tensors.items() if name.endswith(("o_proj.weight", "down_proj.weight", ".w2.weight"))
    ]
    if any(bool(weight.any()) for weight in outputs):
        raise ValueError(f"{path} is no table checkpoint: its layers add to the residual stream")
    embed = tensors["model.embed_tokens.weight"].float()
    rms = (embed.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).sqrt()
    head = tensors.get("lm_head.weight", embed).float()
    return (embed / rms * tensors["model.norm.weight"].float()) @ head.T


def favour(
    following: Mapping[int, int], *, vocab_size: int = 300, strength: float = 12.0, seed: int = 0
) -> torch.Tensor:
    """``[vocab, vocab]`` random logits in which ``following[i]`` leads row ``i`` by ``strength``.

    ``{10: 11, 11: 12, 12: 10}`` loops over three tokens once it has met one.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(vocab_size, vocab_size, generator=generator)
    for token, favourite in following.items():
        logits[token, favourite] = logits[token].max() + strength
    return logits


def _config(family: str, *, vocab_size: int, tie: bool | None, overrides: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    if family not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {family!r}")
    model_type, architecture, special = FAMILIES[family]
    fields: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "dtype": "float32",
        "architectures": [architecture],
    }
    fields |= special
    if tie is not None:
        fields["tie_word_embeddings"] = tie
    return AutoConfig.for_model(model_type, **(fields | overrides))


def _tensors(
    config: Any, lm_head_scale: float, output_scale: float, random: RandomWeights
) -> Iterator[tuple[str, torch.Tensor]]:
    normal, norm = random.normal, random.norm
    hidden = config.hidden_size
    head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    architecture = config.architectures[0]
    attention_bias = getattr(config, "attention_bias", False)
    qkv_bias = attention_bias or architecture == "Qwen2ForCausalLM"
    tied = config.tie_word_embeddings

    yield (
        "model.embed_tokens.weight",
        normal(config.vocab_size, hidden, std=STD * (lm_head_scale if tied else 1)),
    )
    for layer in range(config.num_hidden_layers):
        for module, outputs, inputs, bias, scale in (
            ("self_attn.q_proj", queries, hidden, qkv_bias, 1.0),
            ("self_attn.k_proj", keys, hidden, qkv_bias, 1.0),
            ("self_attn.v_proj", keys, hidden, qkv_bias, 1.0),
            ("self_attn.o_proj", hidden, queries, attention_bias, output_scale),
            *_mlp_modules(config, layer, output_scale),
        ):
            yield f"model.layers.{layer}.{module}.weight", normal(outputs, inputs) * scale
            if bias:
                yield f"model.layers.{layer}.{module}.bias", normal(outputs) * scale
        if architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"):
            yield f"model.layers.{layer}.self_attn.q_norm.weight", norm(head_dim)
            yield f"model.layers.{layer}.self_attn.k_norm.weight", norm(head_dim)
        yield f"model.layers.{layer}.input_layernorm.weight", norm(hidden)
        yield f"model.layers.{layer}.post_attention_layernorm.weight", norm(hidden)
    final = norm(hidden)
    if tied:
        # Signs at random, or every token would be followed by itself.
        final *= torch.randint(0, 2, (hidden,), generator=random.generator) * 2 - 1
    yield "model.norm.weight", final
    if not tied:
        yield "lm_head.weight", normal(config.vocab_size, hidden, std=STD * lm_head_scale)


def _mlp_modules(config: Any, layer: int, output_scale: float) -> Iterator[tuple[str, int, int, bool, float]]:
    """Name, outputs, inputs, bias and factor of the linear modules of a layer's MLP, or of its experts."""
    hidden, mlp, bias = config.hidden_size, config.intermediate_size, getattr(config, "mlp_bias", False)
    experts = getattr(config, "num_experts", None)
    dense = layer in (getattr(config, "mlp_only_layers", None) or ())
    if not experts or dense or (layer + 1) % getattr(config, "decoder_sparse_step", 1):
        yield "mlp.gate_proj", mlp, hidden, bias, 1.0
        yield "mlp.up_proj", mlp, hidden, bias, 1.0
        yield "mlp.down_proj", hidden, mlp, bias, output_scale
        return
    block, gate, up, down = "mlp", "gate_proj", "up_proj", "down_proj"
    if config.architectures[0] == "MixtralForCausalLM":
        block, gate, up, down = "block_sparse_moe", "w1", "w3", "w2"
    size = getattr(config, "moe_intermediate_size", mlp)
    yield f"{block}.gate", experts, hidden, False, 4.0  # so that tokens choose differently, and surely
    for expert in range(experts):
        yield f"{block}.experts.{expert}.{gate}", size, hidden, False, 1.0
        yield f"{block}.experts.{expert}.{up}", size, hidden, False, 1.0
        yield f"{block}.experts.{expert}.{down}", hidden, size, False, output_scale


def _save(path: Path, tensors: dict[str, torch.Tensor], shards: int) -> None:
    from safetensors.torch import save_file

    if shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = names[shard::shards]
        save_file({name: tensors[name] for name in part}, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    _write_json(
        path / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": weight_map}
    )


def _tokenizer(vocab_size: int, max_length: int) -> Any:
    """A byte-level tokenizer without merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    characters = bytes_to_unicode()
    first = 0 if vocab_size >= 256 + len(SPECIAL_TOKENS) else ord("a")
    vocab = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    for byte in range(first, 256):
        if len(vocab) < vocab_size:
            vocab[characters[byte]] = len(vocab)
    for extra in range(vocab_size - len(vocab)):
        vocab[f"<extra_{extra}>"] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL_TOKENS[PAD],
        bos_token=SPECIAL_TOKENS[BOS],
        eos_token=SPECIAL_TOKENS[EOS],
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
