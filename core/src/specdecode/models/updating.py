"""New weights into a loaded model, in place: first all of them are found and checked, then they are copied.

A captured graph, and whoever shares the model's tables, goes on with the addresses it knows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from specdecode.contract import ConfigError
from specdecode.distributed import Share
from specdecode.layers.packed import Packable

from .decoder import Decoder
from .families import decoder_config
from .files import ModelFiles, resolve_model
from .placing import Place, few, harmless, match, places_in
from .quantized import read_scheme
from .transfer import read_weights
from .transformers_backend import TransformersDecoder
from .transformers_support import from_checkpoint, from_state, is_native
from .weights import StoredTensor, load_weights, stored_tensors

#: As a caller gives them: a model as ``EngineArgs.model`` names it, or tensors by a checkpoint's names.
WeightSource = str | Path | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]

#: Fields of a config that say nothing of what is computed with the weights.
_IRRELEVANT = frozenset(
    {
        "_name_or_path", "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "name_or_path",
        "pad_token_id", "torch_dtype", "transformers_version", "use_cache",
    }
)  # fmt: skip


@attrs.frozen(eq=False)
class GivenTensor:
    """A tensor that the caller holds, in the place of a stored one."""

    name: str
    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def num_bytes(self) -> int:
        return self.tensor.nbytes

    def part(self, share: Share) -> GivenTensor:
        return GivenTensor(self.name, self.tensor[share.index])

    def map(self) -> torch.Tensor:
        return self.tensor


@attrs.frozen(eq=False, kw_only=True)
class NewWeights:
    """Weights that were checked against a model, and how they get into it."""

    source: str  #: as messages call it
    path: str | None  #: directory of the files; None: they were given as tensors
    num_tensors: int
    num_bytes: int
    copy: Callable[[], None] = attrs.field(repr=False)  #: changes the model; may raise in the middle
    #: ``load(names=None)``: the tensors by the checkpoint's names, on the CPU; all, or those of ``names``
    load: Callable[..., Iterator[tuple[str, torch.Tensor]]] = attrs.field(repr=False)


def new_weights(model: Decoder | TransformersDecoder, files: ModelFiles, source: WeightSource) -> NewWeights:
    """Find and check the weights of ``source`` for ``model``, which is not changed.

    Of files the headers are read; a model of transformers is read whole, onto the host.

    Args:
        files: what ``model`` was made from.
        source: another checkpoint of the same shape, or tensors by the names of one: all of them.

    Raises:
        ConfigError: names what does not fit: the config, a tensor's name or its shape.
    """
    _check_unquantized(files)
    _check_refillable(model, files)
    _check_text_only(files)
    if isinstance(source, (str, Path)):
        return _of_files(model, files, str(source))
    return _of_tensors(model, files, _listed(source))


def _of_files(model: Decoder | TransformersDecoder, files: ModelFiles, source: str) -> NewWeights:
    new = resolve_model(source, trust_remote_code=files.trust_remote_code)
    _check_config(files, new)
    stored = list(stored_tensors(new.path))
    whence = f"checkpoint {new.path}"
    if isinstance(model, Decoder):
        copy = _native(model, stored, whence, files.architecture)
    else:
        copy = _transformers(model, from_checkpoint(new, model.dtype, strict=True))

    def load(names: Collection[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        return load_weights(new.path, names)

    return NewWeights(
        source=source,
        path=str(new.path),
        num_tensors=len(stored),
        num_bytes=sum(tensor.num_bytes for tensor in stored),
        copy=copy,
        load=load,
    )


def _of_tensors(
    model: Decoder | TransformersDecoder, files: ModelFiles, given: list[GivenTensor]
) -> NewWeights:
    if isinstance(model, Decoder):
        copy = _native(model, given, "weights", files.architecture)
    else:
        state = {own.name: own.tensor for own in given}
        copy = _transformers(model, from_state(files, model.dtype, state))

    def load(names: Collection[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        return ((own.name, own.tensor.cpu()) for own in given if names is None or own.name in names)

    return NewWeights(
        source="tensors",
        path=None,
        num_tensors=len(given),
        num_bytes=sum(own.num_bytes for own in given),
        copy=copy,
        load=load,
    )


def _listed(source: Any) -> list[GivenTensor]:
    pairs = source.items() if isinstance(source, Mapping) else source
    wanted = (
        "weights must be a model's directory, a mapping of names to tensors, or an iterable of (name, tensor)"
    )
    try:
        given = [(name, tensor) for name, tensor in pairs]
    except (TypeError, ValueError):
        raise ConfigError(f"{wanted}, got {type(source).__name__}") from None
    for name, tensor in given:
        if not (isinstance(name, str) and isinstance(tensor, torch.Tensor) and tensor.is_floating_point()):
            got = getattr(tensor, "dtype", tensor)
            raise ConfigError(f"{wanted} of a floating dtype, got {name!r}: {got!r}")
    return [GivenTensor(name, tensor.detach()) for name, tensor in given]


def _check_refillable(model: Decoder | TransformersDecoder, files: ModelFiles) -> None:
    layers = [layer for layer in model.modules() if isinstance(layer, Packable) and not layer.refillable]
    if layers:
        raise ConfigError(
            f"{len(layers)} layers of model {files.name!r} compute with a GGUF file's blocks (quantization="
            "'gguf'), which are not replaced in place: make the engine without it"
        )


def _check_unquantized(files: ModelFiles) -> None:
    if (scheme := read_scheme(files.hf_config, files.name)) is not None:
        raise ConfigError(
            f"model {files.name!r} is quantized ({scheme.method}), and quantized weights are not replaced in "
            "place in this version: make a new engine"
        )


def _check_text_only(files: ModelFiles) -> None:
    if files.vision is not None:
        raise ConfigError(
            f"model {files.name!r} takes images, and the weights of such models are not replaced in place in "
            "this version: make a new engine"
        )


def _check_config(old: ModelFiles, new: ModelFiles) -> None:
    """Raise ConfigError unless both are one model but for the weights."""
    _check_unquantized(new)
    changed = _differences(old, new) if old.architecture == new.architecture else ["architectures"]
    if changed:
        raise ConfigError(
            f"model {new.name!r} is not of the shape of {old.name!r}, whose weights it is to replace: "
            f"config.json differs in {few(changed)}; make a new engine of it"
        )


def _differences(old: ModelFiles, new: ModelFiles) -> list[str]:
    """Names of what differs in two configs and matters."""
    if is_native(old):
        first, second = (
            attrs.asdict(decoder_config(files.hf_config, files.architecture), recurse=False)
            for files in (old, new)
        )
    else:
        first, second = (files.hf_config.to_dict() for files in (old, new))
    names = [*first, *(name for name in second if name not in first)]
    return [name for name in names if name not in _IRRELEVANT and first.get(name) != second.get(name)]


# -- the native decoder ---------------------------------------------------------------------------------
def _native(
    model: Decoder, tensors: Iterable[StoredTensor] | Iterable[GivenTensor], whence: str, architecture: str
) -> Callable[[], None]:
    found: list[StoredTensor | GivenTensor] = list(tensors)
    placed, unused = match(dict(places_in(model)), found, whence, architecture)
    if unused := [name for name in unused if not harmless(name, model)]:
        raise ConfigError(
            f"the {whence} holds {len(unused)} tensors that the model has no place for ({few(unused)}); "
            "leave them out, or see whether it is of this model"
        )
    return lambda: _copy(model, placed)


@torch.inference_mode()
def _copy(model: Decoder, placed: Iterable[tuple[StoredTensor | GivenTensor, Place]]) -> None:
    """Module by module, so that of a packed layer alone there is a second copy while it is packed."""
    by_module: dict[torch.nn.Module, list[tuple[StoredTensor | GivenTensor, Place]]] = {}
    for tensor, place in placed:
        by_module.setdefault(place.module, []).append((tensor, place))
    from_files: list[tuple[StoredTensor, torch.Tensor]] = []
    for entries in by_module.values():
        with entries[0][1].refilled():
            for tensor, place in entries:
                destination, share = place.destination(), place.share
                if isinstance(tensor, StoredTensor) and model.device.type == "cuda":
                    if place.takes:
                        from_files.append((place.share_of(tensor), destination))  # all by several threads
                else:
                    whole = tensor.map()
                    destination.copy_(whole if share is None else whole[share.index])
    read_weights(from_files)
    if model.config.tie_word_embeddings and model.lm_head.packed:
        with model.lm_head.refilled():
            model.lm_head.weight.copy_(model.embed_tokens.rows)


# -- models of transformers -----------------------------------------------------------------------------
def _transformers(model: TransformersDecoder, fresh: Any) -> Callable[[], None]:
    own, new = model.model.state_dict(), fresh.state_dict()
    shapes = [{name: tuple(tensor.shape) for name, tensor in state.items()} for state in (own, new)]
    if shapes[0] != shapes[1]:
        names = [name for name in own if shapes[0][name] != shapes[1].get(name)]
        raise ConfigError(
            f"the new weights do not fit the model in {len(names)} tensors ({few(names)}); see whether both "
            "are of one model"
        )

    @torch.inference_mode()
    def copy() -> None:
        for name, tensor in own.items():
            tensor.copy_(new[name])

    return copy
