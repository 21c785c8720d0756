"""Which models of transformers its backend runs, what their KV is like, and how they are loaded."""

from __future__ import annotations

import copy
import logging
import re
from pathlib import Path
from typing import Any

import attrs
import torch
from specdec_kernels.attention import AttentionMetadata

from specdecode.contract import ConfigError
from specdecode.layers import AttentionBackend

from .families import FAMILIES
from .files import ModelFiles
from .transformers_backend import ATTENTION, TransformersConfig, TransformersDecoder, register_attention
from .weights import weight_files

logger = logging.getLogger(__name__)

#: Layer types of a config whose attention is the metadata's, maybe under a window.
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
#: Rope types whose frequencies depend on the longest position of a forward.
_GROWING_ROPE = ("dynamic", "longrope")
_DUMMY_SEED = 0


def is_native(files: ModelFiles) -> bool:
    """Whether the native decoder runs the model; else it is transformers' code on our attention."""
    return files.architecture in FAMILIES


def check_architecture(
    files: ModelFiles, *, quantization: str | None = None, exact: bool | None = None
) -> None:
    """Refuse, from the config alone, what neither the native decoder nor transformers' can run here.

    Raises:
        ConfigError: names the architecture, the reason and the remedy.
    """
    if is_native(files):
        return
    if files.vision is not None:
        raise ConfigError(
            f"the text model of {files.name!r} is of architecture {files.architecture!r}; with images, it "
            f"must be one of {', '.join(sorted(FAMILIES))}"
        )
    if reason := _refusal(files.architecture, files.hf_config):
        raise ConfigError(
            f"architecture {files.architecture!r} of the model's config is not supported: {reason}; use one "
            f"of {', '.join(sorted(FAMILIES))}, or another causal model of transformers with plain attention"
        )
    for field, value in (("quantization", quantization), ("exact", exact)):
        if value:
            raise ConfigError(
                f"{field}={value!r} works with the native families only ({', '.join(sorted(FAMILIES))}), got "
                f"{files.architecture!r}: leave {field} out"
            )


def _refusal(architecture: str, config: Any) -> str | None:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    names = NAMES.get(config.model_type, ())
    known = {name for entry in NAMES.values() for name in ([entry] if isinstance(entry, str) else entry)}
    if architecture not in known:
        return "transformers has no causal language model of that name"
    model = getattr(transformers, architecture)
    if getattr(model, "_is_stateful", False):
        return (
            "its layers keep a recurrent state, which a paged KV cache cannot hold and which cannot be "
            "rolled back when drafts are rejected"
        )
    if architecture not in ([names] if isinstance(names, str) else names):
        return f"it does not fit the config's model_type {config.model_type!r}"
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        return "it attends to an encoder"
    if config.get_text_config() is not config:
        return "it takes more than text"
    if not getattr(model, "_supports_attention_backend", False):
        return "its code does not use transformers' attention interface"
    others = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if others:
        return f"it has layers of type {', '.join(sorted(map(str, others)))}"
    return None


def describe(files: ModelFiles, *, max_model_len: int) -> TransformersConfig:
    """Learn the model's shape by running its code without weights.

    Raises:
        ConfigError: the model does what paged attention does not, or its layers are not alike.
    """
    check_architecture(files)
    _check_rope(files, max_model_len)
    options: dict[str, Any] = {}
    with torch.device("meta"), torch.inference_mode():
        config = copy.deepcopy(files.hf_config)
        for parameters in _rope_parameters(config):
            if parameters["rope_type"] in _GROWING_ROPE:
                parameters["rope_type"] = "default"  # the others look at the positions
        if hasattr(config, "_experts_implementation"):
            options["experts_implementation"] = "batched_mm"  # the one that looks at no values
        try:
            model = _from_config(config, torch.float32, **options)
            calls = _Calls()
            decoder = _decoder(files, model, torch.float32, torch.device("meta"), max_model_len, calls)
            layers = config.num_hidden_layers
            ids = torch.zeros(2, dtype=torch.int64)
            meta = AttentionMetadata(
                rows=ids, positions=ids, write_slots=ids, base=ids, block_table=ids[None], block_size=2
            )
            hidden, _ = decoder(ids, ids, meta, range(layers), range(layers + 1))
            vocab_size = decoder.compute_logits(hidden).shape[-1]
        except ConfigError:
            raise
        except Exception as error:  # the model's own code: it may raise anything
            raise ConfigError(
                f"{files.architecture} of transformers cannot be run on paged attention "
                f"({type(error).__name__}: {error}); use another model"
            ) from error
    kv = calls.check(files, layers)
    return TransformersConfig(
        vocab_size=vocab_size,
        hidden_size=hidden.shape[-1],
        num_layers=layers,
        num_heads=kv.num_heads,
        num_kv_heads=kv.num_kv_heads,
        head_dim=kv.head_dim,
        value_dim=kv.value_dim,
    )


@attrs.frozen
class _Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None = attrs.field(eq=False)


class _Calls:
    """An attention backend that notes what each layer asks for; a layer's cache is its index."""

    def __init__(self) -> None:
        self.written: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self.shapes: dict[int, _Shape] = {}

    def write(self, key: torch.Tensor, value: torch.Tensor, cache: Any, meta: AttentionMetadata) -> None:
        self.written.append((cache, key, value))

    def attend(
        self, query: torch.Tensor, cache: Any, meta: AttentionMetadata, *, scale: float, window: int | None
    ) -> torch.Tensor:
        _, key, value = self.written[-1]
        self.shapes[cache] = _Shape(query.shape[1], key.shape[1], key.shape[2], value.shape[2], window)
        return query.new_empty(*query.shape[:2], value.shape[2])

    def check(self, files: ModelFiles, layers: int) -> _Shape:
        """The shape all layers share."""
        name = files.architecture
        if sorted(layer for layer, _, _ in self.written) != list(range(layers)):
            raise ConfigError(
                f"{name} of transformers calls attention in {len(self.written)} places for {layers} layers, "
                "so some state is kept elsewhere than in one KV cache a layer; use another model"
            )
        shape = self.shapes[0]
        if any(other != shape for other in self.shapes.values()):
            raise ConfigError(
                f"{name} of transformers has layers whose KV heads differ in number or size, which one KV "
                "cache cannot hold in this version; use another model"
            )
        kinds = (getattr(files.hf_config, "layer_types", None) or ())[:layers]
        passed = [self.shapes[layer].window is not None for layer in range(layers)]
        if kinds:
            lost = any(
                kind == "sliding_attention" and not given for kind, given in zip(kinds, passed, strict=False)
            )
        else:
            lost = getattr(files.hf_config, "sliding_window", None) is not None and not any(passed)
        if lost:  # it is in the model's mask alone, which is not made here
            raise ConfigError(
                f"{name} of transformers does not pass its sliding window on to attention; use another model"
            )
        return shape


def load(
    files: ModelFiles,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    load_format: str,
    backend: AttentionBackend | None,
) -> TransformersDecoder:
    """The model of ``files`` with its weights, or with seeded random ones for ``load_format="dummy"``."""
    shape = describe(files, max_model_len=max_model_len)
    if load_format == "dummy":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_DUMMY_SEED)
            model = _from_config(copy.deepcopy(files.hf_config), dtype)
    else:
        model = from_checkpoint(files, dtype)
    decoder = _decoder(files, model.to(device), dtype, device, max_model_len, backend)
    decoder.config = shape
    _hold_rope(model)
    return decoder.requires_grad_(False)


def _decoder(
    files: ModelFiles,
    model: Any,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    backend: AttentionBackend | None,
) -> TransformersDecoder:
    decoder = TransformersDecoder(
        model, dtype=dtype, device=device, max_model_len=max_model_len, backend=backend
    )
    if any(isinstance(module, torch.nn.Conv1d) for module in decoder.body.modules()):
        raise ConfigError(
            f"{files.architecture} of transformers convolves over tokens, a state that a paged KV cache "
            "cannot hold; use another model"
        )
    return decoder


def _from_config(config: Any, dtype: torch.dtype, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    register_attention()
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION, **options)


def from_checkpoint(files: ModelFiles, dtype: torch.dtype, *, strict: bool = False) -> Any:
    """The model of transformers with the weights of ``files``, on the host.

    Args:
        strict: refuse tensors that it has no place for.

    Raises:
        ConfigError: tensors are missing, too many or of another shape, or the files are damaged.
    """
    weight_files(files.path)
    whence = f"checkpoint {files.path}"
    return _from_pretrained(files, dtype, whence, strict=strict, path=files.path, use_safetensors=True)


def from_state(files: ModelFiles, dtype: torch.dtype, state: dict[str, torch.Tensor]) -> Any:
    """The same with weights by the names of a checkpoint; none may be missing or too many."""
    return _from_pretrained(files, dtype, "weights", strict=True, path=None, state_dict=state)


def _from_pretrained(
    files: ModelFiles, dtype: torch.dtype, whence: str, *, strict: bool, path: Path | None, **source: Any
) -> Any:
    import transformers

    register_attention()
    remedy = "fetch it again, or see whether config.json is its own"
    try:
        loaded: Any = getattr(transformers, files.architecture).from_pretrained(
            path,
            config=copy.deepcopy(files.hf_config),
            dtype=dtype,
            attn_implementation=ATTENTION,
            output_loading_info=True,
            **source,
        )
    except Exception as error:  # transformers documents no set of errors for what the files may hold
        raise ConfigError(
            f"the {whence} cannot be loaded as {files.architecture} ({error}); {remedy}"
        ) from error
    model, found = loaded
    for kind, what in (("missing_keys", "lacks"), ("unexpected_keys", "holds, beside its own,")):
        names = sorted(found[kind]) if strict or kind == "missing_keys" else []
        names = [name for name in names if not _is_extra(name, files.hf_config.num_hidden_layers)]
        if names:
            raise ConfigError(
                f"the {whence} {what} {len(names)} tensors of {files.architecture} "
                f"({', '.join(names[:4])}); {remedy}"
            )
    return model


def _is_extra(name: str, num_layers: int) -> bool:
    """Whether it is of a layer behind the last one, which predicts further tokens, for who drafts by it."""
    layer = re.match(r"(?:model\.)?layers\.(\d+)\.", name)
    return layer is not None and int(layer[1]) >= num_layers


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """One set of parameters, or one for each type of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [entry for entry in (rope, *rope.values()) if isinstance(entry, dict) and "rope_type" in entry]


def _hold_rope(model: Any) -> None:
    """Let what grows stay as it was made: :func:`_check_rope` admits no position at which it would change.

    Else transformers would look for the longest position on the host at every step.
    """
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict):  # one for each type of layer
            module.rope_type = {name: _held(own) for name, own in kind.items()}
        elif kind is not None:
            module.rope_type = _held(kind)


def _held(rope_type: str) -> str:
    return "default" if rope_type in _GROWING_ROPE else rope_type


def _check_rope(files: ModelFiles, max_model_len: int) -> None:
    for parameters in _rope_parameters(files.hf_config):
        kind = parameters["rope_type"]
        if kind not in _GROWING_ROPE:
            continue
        limit = files.hf_config.max_position_embeddings
        if kind == "longrope":
            limit = parameters.get("original_max_position_embeddings") or getattr(
                files.hf_config, "original_max_position_embeddings", limit
            )
        if max_model_len > limit:
            raise ConfigError(
                f"max_model_len={max_model_len} is too long for {files.architecture}: beyond {limit} "
                f"positions its {kind} rotary embedding changes with the longest text of a step; set "
                f"max_model_len={limit}"
            )
