"""What a model's config says to the engine: dtype, context length, end tokens, sampling defaults."""

from __future__ import annotations

import json
import logging
from typing import Any

import torch

from specdecode.contract import ConfigError, TargetInfo, TargetTokenizer

from .families import decoder_config
from .files import ModelFiles
from .sharing import check_shareable
from .tokenizer import tokenizer_of
from .transformers_support import describe, is_native

logger = logging.getLogger(__name__)

DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}

#: Keys of ``generation_config.json`` that are defaults of sampling parameters of the same name.
SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def resolve_device(name: str) -> torch.device:
    """``"auto"`` is a GPU where torch has one.

    Raises:
        ConfigError: torch cannot use it here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device must be one torch can use here, got {name!r}: {error}") from None
    return torch.device(name)


def resolve_dtype(dtype: str | torch.dtype, hf_config: Any, device: torch.device) -> torch.dtype:
    """The dtype of weights and activations.

    ``"auto"`` is the config's, and float32 if it names none; on a CPU float16 becomes float32,
    since few CPUs compute in float16. Of a quantised checkpoint float16 becomes bfloat16, which its weights
    are decoded to.
    """
    if dtype != "auto":
        return _dtype(dtype, f"dtype must be auto, {', '.join(DTYPES)}, got {dtype!r}")
    stored = getattr(hf_config, "dtype", None) or torch.float32
    resolved = _dtype(
        stored, f"dtype {stored!r} of the model's config is not supported; set dtype to float32 or bfloat16"
    )
    if resolved is torch.float32 and device.type == "cuda":
        logger.warning(
            "the model's config says float32 or no dtype, as files made of GGUF ones do: it is computed in "
            "float32; dtype='bfloat16' is several times as fast on this device"
        )
    if resolved is torch.float16 and getattr(hf_config, "quantization_config", None):
        return torch.bfloat16
    return torch.float32 if resolved is torch.float16 and device.type == "cpu" else resolved


def _dtype(dtype: str | torch.dtype, refusal: str) -> torch.dtype:
    resolved = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if resolved is None or resolved not in DTYPES.values():
        raise ConfigError(refusal)
    return resolved


def resolve_max_model_len(max_model_len: int | None, hf_config: Any) -> int:
    """The context length: the user's, or what the config gives.

    A config's ``max_position_embeddings`` may be the length before rope scaling (types ``linear``,
    ``yarn`` and ``dynamic``): the limit is then ``factor`` times the original length. The default
    is the limit, but for ``dynamic`` the unscaled length, since there a longer context changes the
    frequencies of short prompts too.

    Raises:
        ConfigError: ``max_model_len`` is below 1 or above the limit, or the config names none.
    """
    trained = getattr(hf_config, "max_position_embeddings", None)
    if trained is None:
        raise ConfigError(
            f"the model's config (model_type {hf_config.model_type!r}) has no max_position_embeddings: "
            "models without positions, such as recurrent ones, are not supported; use another model"
        )
    rope = getattr(hf_config, "rope_parameters", None) or {}
    rope_type = rope.get("rope_type", "default")
    limit = trained
    if rope_type in ("linear", "yarn", "dynamic"):
        original = rope.get("original_max_position_embeddings") or trained
        limit = max(trained, int(original * (rope.get("factor") or 1.0)))
    if max_model_len is None:
        return trained if rope_type == "dynamic" else limit
    if not 1 <= max_model_len <= limit:
        raise ConfigError(
            f"max_model_len must be between 1 and {limit}, the model's context length, got {max_model_len}"
        )
    return max_model_len


def describe_target(
    files: ModelFiles,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    tensor_parallel_size: int = 1,
    tokenizer: TargetTokenizer | None = None,
) -> TargetInfo:
    """What draft methods are told of the target before its weights are loaded.

    Args:
        tokenizer: what cuts its requests; None: its own.

    Raises:
        ConfigError, Unsupported: it cannot be shared out among so many ranks.
    """
    config = (
        decoder_config(files.hf_config, files.architecture)
        if is_native(files)
        else describe(files, max_model_len=max_model_len)
    )
    check_shareable(files, tensor_parallel_size)
    return TargetInfo(
        path=str(files.path),
        architecture=files.architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        value_dim=None if config.value_dim == config.head_dim else config.value_dim,
        max_model_len=max_model_len,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        tensor_parallel_size=tensor_parallel_size,
        extra_layers=getattr(files.hf_config, "num_nextn_predict_layers", None) or 0,
        native=is_native(files),
        config=files.hf_config.to_dict(),
        tokenizer=tokenizer or tokenizer_of(files),
    )


def eos_token_ids(files: ModelFiles) -> tuple[int, ...]:
    """The ids that end a text: the generation config's, else the config's; empty if there are none."""
    ids = _generation_config(files).get("eos_token_id")
    if ids is None:
        ids = getattr(files.hf_config, "eos_token_id", None)
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)


def default_sampling(files: ModelFiles) -> dict[str, Any]:
    """Sampling parameters the model's authors recommend: what ``generation_config.json`` sets of them."""
    generation = _generation_config(files)
    return {key: generation[key] for key in SAMPLING_KEYS if generation.get(key) is not None}


def _generation_config(files: ModelFiles) -> dict[str, Any]:
    file = files.path / "generation_config.json"
    if not file.is_file():
        return {}
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{file} cannot be read ({error}); correct or remove it") from error
