"""What a draft checkpoint is, and what is wrong with it, told by its config and headers, without torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs
from specdecode.contract import CheckpointInfo, ConfigError
from specdecode.heads.fields import activation, positive, rope_parameters
from specdecode.heads.native import FAMILIES, Family

#: Rope types whose ``factor`` lengthens the context that the config names.
_LENGTHENING = ("linear", "yarn")
#: What the config of a language model must say: where it does not, transformers would take another model's.
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
_SHOWN = 4


@attrs.frozen(kw_only=True)
class DraftShape:
    """What core has to know of a draft before it is loaded."""

    layers: int
    heads: int  #: of keys and values
    head_dim: int
    vocab_size: int
    context: int  #: tokens that it was made for
    native: bool  #: run by the native decoder, else by transformers' code
    hidden: int = 0  #: of a native one, as what follows
    inner: int = 0
    query_heads: int = 0
    value_dim: int | None = None  #: of a value head, if it is not ``head_dim``

    @property
    def weights(self) -> int:
        """Of a layer's products."""
        attended = 2 * (self.query_heads + self.heads) * self.head_dim
        return self.hidden * (attended + 3 * self.inner)

    def divides(self, ranks: int) -> bool:
        """Whether so many can share it out."""
        whole = self.query_heads % ranks == 0 and self.inner % ranks == 0
        return self.native and whole and (self.heads % ranks == 0 or ranks % self.heads == 0)


def describe(checkpoint: CheckpointInfo) -> DraftShape:
    """The shape of a draft, checked against its headers as far as the native families go.

    Another architecture of transformers is described by core, which runs its code without weights.

    Raises:
        Unsupported, ConfigError: what the config or the tensors lack.
    """
    config, where = checkpoint.config, f"the draft {checkpoint.path}"
    quantised = config.get("quantization_config")
    if quantised:
        from specdecode.models import scheme_of  # imports torch

        scheme_of(quantised, str(checkpoint.path))
    if checkpoint.tensors and not any(checkpoint.path.glob("*.safetensors")):
        raise ConfigError(f"{where} has pickled weights only: save it as safetensors")
    family = FAMILIES.get(_architecture(config) or "")
    if family is None:
        return _foreign(checkpoint)
    sizes = {name: _size(config, name, where) for name in _SIZES}
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    shape = DraftShape(
        layers=sizes["num_hidden_layers"],
        heads=config.get("num_key_value_heads") or family.num_kv_heads or heads,
        head_dim=config.get("head_dim") or family.head_dim or hidden // heads,
        vocab_size=sizes["vocab_size"],
        context=_context(config, sizes["max_position_embeddings"], where),
        native=True,
        hidden=hidden,
        inner=sizes["intermediate_size"],
        query_heads=heads,
    )
    activation(config, where)
    if not checkpoint.dummy:  # of a dummy no weights are read
        wanted = _tensors(config, family, shape, sizes)
        if quantised:  # how its linear layers are stored, core knows
            wanted = (entry for entry in wanted if not entry[0].endswith(("_proj.weight", "lm_head.weight")))
        _check_tensors(checkpoint, wanted)
    return shape


def looks_like_a_language_model(checkpoint: CheckpointInfo) -> str | None:
    """Why a checkpoint is a whole causal language model, no head beside a target; None: it is not."""
    architecture = _architecture(checkpoint.config)
    names = {name.removeprefix("model.") for name in checkpoint.tensors}
    whole = {"embed_tokens.weight", "norm.weight", "layers.0.input_layernorm.weight"} <= names
    if architecture not in FAMILIES or not whole or "fc.weight" in names:
        return None
    return f"a whole {architecture}"


def _architecture(config: Mapping[str, Any]) -> str | None:
    named = config.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else None


def _size(config: Mapping[str, Any], name: str, where: str) -> int:
    value = positive(config, name, where)
    if value is None:
        raise ConfigError(f"{where}: config.json has no {name}; is it the config of a causal language model?")
    return value


def _context(config: Mapping[str, Any], trained: int, where: str) -> int:
    rope = rope_parameters(config, where)
    if rope["rope_type"] not in _LENGTHENING:
        return trained
    original = rope.get("original_max_position_embeddings") or trained
    return max(trained, int(original * (rope.get("factor") or 1.0)))


def _foreign(checkpoint: CheckpointInfo) -> DraftShape:
    import torch  # heavy, and the one way to learn it
    from specdecode.models import describe_target, resolve_max_model_len, resolve_model

    files = resolve_model(checkpoint.path)
    context = resolve_max_model_len(None, files.hf_config)
    info = describe_target(files, dtype=torch.float32, device=torch.device("cpu"), max_model_len=context)
    return DraftShape(
        layers=info.num_layers,
        heads=info.num_kv_heads,
        head_dim=info.head_dim,
        value_dim=info.value_dim,
        vocab_size=info.vocab_size,
        context=context,
        native=False,
    )


def _check_tensors(checkpoint: CheckpointInfo, wanted: Iterable[tuple[str, tuple[int, ...]]]) -> None:
    """Every tensor that the native decoder will ask for is there, in the shape that the config says."""
    stored = {name.removeprefix("model."): info.shape for name, info in checkpoint.tensors.items()}
    missing: list[str] = []
    misshapen: list[str] = []
    for name, expected in wanted:
        if name not in stored:
            missing.append(name)
        elif stored[name] != expected:
            misshapen.append(f"{name} is {list(stored[name])} instead of {list(expected)}")
    for what, found in (("lacks", missing), ("does not fit its config.json:", misshapen)):
        if found:
            shown = ", ".join(found[:_SHOWN]) + (", ..." if len(found) > _SHOWN else "")
            raise ConfigError(
                f"the draft {checkpoint.path} {what} {shown} ({len(found)} tensors); fetch it again, or see "
                "whether config.json is its own"
            )


def _tensors(
    config: Mapping[str, Any], family: Family, shape: DraftShape, sizes: Mapping[str, int]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names, without the prefix ``model.``, and shapes."""
    vocab, hidden, mlp = shape.vocab_size, sizes["hidden_size"], sizes["intermediate_size"]
    queries, keys = sizes["num_attention_heads"] * shape.head_dim, shape.heads * shape.head_dim

    def said(always: bool | None, key: str) -> bool:
        return bool(config.get(key)) if always is None else always

    qkv_bias, out_bias = (said(bias, "attention_bias") for bias in (family.qkv_bias, family.out_bias))
    mlp_bias = said(family.mlp_bias, "mlp_bias")
    yield "embed_tokens.weight", (vocab, hidden)
    for layer in range(shape.layers):
        for name, size, inputs, bias in (
            ("self_attn.q_proj", queries, hidden, qkv_bias),
            ("self_attn.k_proj", keys, hidden, qkv_bias),
            ("self_attn.v_proj", keys, hidden, qkv_bias),
            ("self_attn.o_proj", hidden, queries, out_bias),
            ("mlp.gate_proj", mlp, hidden, mlp_bias),
            ("mlp.up_proj", mlp, hidden, mlp_bias),
            ("mlp.down_proj", hidden, mlp, mlp_bias),
        ):
            if family.mixture is not None and name.startswith("mlp."):
                continue  # experts come in several layouts, which core tells apart when it loads them
            yield f"layers.{layer}.{name}.weight", (size, inputs)
            if bias:
                yield f"layers.{layer}.{name}.bias", (size,)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"layers.{layer}.{name}.weight", (hidden,)
        if family.qk_norm:
            for name in ("q_norm", "k_norm"):
                yield f"layers.{layer}.self_attn.{name}.weight", (shape.head_dim,)
    yield "norm.weight", (hidden,)
    if not config.get("tie_word_embeddings", family.tied):
        yield "lm_head.weight", (vocab, hidden)
