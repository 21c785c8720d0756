"""One layer of a target's own kind for draft methods, where transformers' code runs the target."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from specdec_kernels.attention import AttentionMetadata

from specdecode.contract import ConfigError
from specdecode.layers import AttentionBackend, KVCache

from .files import ModelFiles
from .transformers_backend import ATTENTION, TransformersDecoder, register_attention


class TransformersLayer(torch.nn.Module):
    """A layer like the last one of a model, and the norm behind it, with weights of their own.

    Args:
        files: the model, of an architecture that transformers' code runs.
        weights: of the layer, named as a checkpoint names them behind ``model.layers.N.``, on the CPU.
        norm: weight of the final norm, ``[H]``.
        max_model_len: positions beyond it are read as the last one.
        backend: of attention; None: the torch references.

    Raises:
        ConfigError: tensors are missing, too many or of another shape; or the layer cannot be driven here.
    """

    def __init__(
        self,
        files: ModelFiles,
        weights: Mapping[str, torch.Tensor],
        norm: torch.Tensor,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        backend: AttentionBackend | None = None,
    ) -> None:
        super().__init__()
        model = _load(files, weights, norm, dtype).to(device)
        self.decoder = TransformersDecoder(
            model, dtype=dtype, device=device, max_model_len=max_model_len, backend=backend
        ).requires_grad_(False)

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, meta: AttentionMetadata, cache: KVCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute tokens, writing their keys and values.

        Args:
            x: ``[T, H]``, the residual stream that enters the layer.
            positions: ``[T]`` int64.

        Returns:
            ``[T, H]`` behind the norm, and ``[T, H]`` before it.
        """
        states, (stream,) = self.decoder.forward_embedded(x, positions, meta, (cache,), taps=(1,))
        return states, stream


def _load(
    files: ModelFiles, weights: Mapping[str, torch.Tensor], norm: torch.Tensor, dtype: torch.dtype
) -> Any:
    import transformers

    config = _last_layer(files.hf_config)
    unused = torch.zeros(config.vocab_size, len(norm), dtype=norm.dtype)
    state = {f"model.layers.0.{name}": tensor for name, tensor in weights.items()}
    state |= {
        "model.norm.weight": norm,
        "model.embed_tokens.weight": unused,
        "lm_head.weight": unused.clone(),
    }
    register_attention()
    try:
        loaded = getattr(transformers, files.architecture).from_pretrained(
            None,
            config=config,
            state_dict=state,
            dtype=dtype,
            attn_implementation=ATTENTION,
            output_loading_info=True,
        )
    except Exception as error:  # transformers documents no set of errors for what the tensors may be
        raise ConfigError(
            f"a layer of {files.architecture} cannot be made of these tensors: {error}; see whether they "
            f"belong to {files.name}"
        ) from error
    model, found = loaded
    for kind, what in (("missing_keys", "lacks"), ("unexpected_keys", "has no place for")):
        if names := sorted(found[kind]):
            raise ConfigError(
                f"a layer of {files.architecture} {what} {len(names)} tensors ({', '.join(names[:4])}); see "
                f"whether they belong to {files.name}"
            )
    return model


def _last_layer(config: Any) -> Any:
    """The config of a model that is the last layer alone; of its embeddings no use is made."""
    alone = copy.deepcopy(config)
    count = config.num_hidden_layers
    for key, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == count and not key.endswith("_token_id"):
            setattr(alone, key, value[-1:])  # what is said layer by layer
    if getattr(config, "first_k_dense_replace", None):
        alone.first_k_dense_replace = int(config.first_k_dense_replace >= count)
    alone.num_hidden_layers = 1
    alone.vocab_size = 1
    alone.pad_token_id = None
    alone.tie_word_embeddings = False
    return alone
