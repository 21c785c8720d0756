"""From model files to a decoder with weights."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

import torch

from specdecode.contract import ConfigError
from specdecode.distributed import SOLO, Group
from specdecode.layers import RMSNorm, RotatingBackend, VocabEmbedding
from specdecode.layers.linear import Linear, without_weights

from .decoder import Decoder
from .experts import check_experts
from .families import decoder_config
from .files import ModelFiles
from .packing import check_quantization, pack_weights
from .placing import checkpoint_modules, few, harmless, match, places_in, turn_of
from .quantized import (
    QuantizedLoader,
    Scheme,
    gguf_parts,
    randomize_quantized,
    read_scheme,
    stored_parts,
)
from .sharing import check_shareable
from .transfer import read_in_turns
from .transformers_backend import TransformersDecoder
from .transformers_support import check_architecture, is_native, load
from .weights import stored_tensors

logger = logging.getLogger(__name__)

#: Standard deviation and seed of dummy weights.
_DUMMY_STD = 0.02
_DUMMY_SEED = 0


def load_model(
    files: ModelFiles,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    load_format: str = "auto",
    backend: RotatingBackend | None = None,
    quantization: str | None = None,
    exact: bool = False,
    group: Group | None = None,
    whole_embedding: bool = False,
) -> Decoder | TransformersDecoder:
    """Build the decoder of ``files`` and give it weights: the native one, or else transformers' model.

    Args:
        load_format: "dummy" for seeded random weights, whatever files there are; else the
            directory's safetensors.
        backend: of the attention layers; None: the torch references.
        quantization: "int8" for int8 weights, made from the checkpoint's.
        exact: the bits of a row do not depend on the rows beside it (on a CPU).
        group: ranks that each load a share of the native decoder; None: this process loads all of it.
        whole_embedding: see :class:`Decoder`.

    Raises:
        ConfigError: the architecture or a quantization is not supported, a file is missing or
            damaged, or tensors are missing or of another shape.
    """
    scheme = read_scheme(files.hf_config, files.name)
    check_architecture(files, quantization=quantization, exact=exact)
    group = group or SOLO
    check_shareable(files, group.size)
    if not is_native(files):
        if scheme is not None:
            raise ConfigError(
                f"model {files.name!r} is quantized ({scheme.method}), which works with the native families "
                f"only, got {files.architecture!r}: use an unquantized checkpoint of it"
            )
        return load(
            files,
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            load_format=load_format,
            backend=backend,
        )
    config = decoder_config(files.hf_config, files.architecture)
    check_quantization(quantization, dtype, device, files)
    check_experts(config, dtype, device)
    if scheme is not None:
        _check_scheme(scheme, files, quantization=quantization, experts=config.experts is not None)
    kept = scheme is not None or quantization == "gguf"
    with without_weights() if kept else contextlib.nullcontext():
        decoder = Decoder(
            config,
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            backend=backend,
            group=group,
            whole_embedding=whole_embedding,
        )
    if load_format == "dummy":
        if scheme is not None:
            randomize_quantized(decoder, scheme, checkpoint_modules, std=_DUMMY_STD, seed=_DUMMY_SEED)
        randomize(decoder)
    else:
        _load_checkpoint(decoder, files, scheme, files.gguf if quantization == "gguf" else None)
    pack_weights(decoder, quantization=quantization, exact=exact)
    return decoder.eval()


def _check_scheme(scheme: Scheme, files: ModelFiles, *, quantization: str | None, experts: bool) -> None:
    """Refuse what a quantised checkpoint does not go with."""
    if quantization is not None:
        raise ConfigError(
            f"quantization={quantization!r} makes quantised weights of plain ones, and model {files.name!r} "
            f"is quantized already ({scheme.method}): leave quantization out"
        )
    if files.vision is not None:
        raise ConfigError(
            f"model {files.name!r} is quantized ({scheme.method}) and takes images, which does not go "
            "together yet: use an unquantized checkpoint of it"
        )
    if experts:
        raise ConfigError(
            f"model {files.name!r} is a quantized ({scheme.method}) mixture of experts, which is not "
            "supported: use an unquantized checkpoint of it"
        )


def randomize(module: torch.nn.Module, *, seed: int = _DUMMY_SEED) -> None:
    """Fill all weights but those of the norms from a seeded normal distribution: ``load_format="dummy"``."""
    norms = {id(own) for part in module.modules() if isinstance(part, RMSNorm) for own in part.parameters()}
    owners: dict[int, torch.nn.Parameter] = {}
    for own in module.parameters():  # a tied table comes once, also if the output layer has some rows
        if own.numel():
            owners.setdefault(own.untyped_storage().data_ptr(), own)
    filled = [own for own in owners.values() if id(own) not in norms]
    generator = torch.Generator(filled[0].device).manual_seed(seed)
    shared = _shared_parameters(module)
    for parameter in filled:
        if id(parameter) in shared:
            _draw_share(*shared[id(parameter)], generator)
        else:
            parameter.data.normal_(0.0, _DUMMY_STD, generator=generator)


def _shared_parameters(module: torch.nn.Module) -> dict[int, tuple[Linear | VocabEmbedding, str]]:
    """Parameters of which this rank holds a share, with their layers."""
    return {
        id(own): (layer, kind)
        for layer in module.modules()
        if isinstance(layer, (Linear, VocabEmbedding))
        for kind, own in layer.named_parameters(recurse=False)
        if layer.share(kind, _parts(layer)[0]) is not None
    }


def _parts(layer: Linear | VocabEmbedding) -> tuple[str | None, ...]:
    return layer.parts if isinstance(layer, Linear) else (None,)


def _draw_share(layer: Linear | VocabEmbedding, kind: str, generator: torch.Generator) -> None:
    """This rank's share of what one rank alone would draw."""
    places = [(layer.share(kind, part), layer.destination(kind, part)) for part in _parts(layer)]
    outputs = [share.whole if share.dim == 0 else len(place) for share, place in places if share]
    like = places[0][1]
    share = places[0][0]
    inputs = like.shape[1:] if share is None or share.dim == 0 else (share.whole,)
    whole = like.new_empty(sum(outputs), *inputs).normal_(0.0, _DUMMY_STD, generator=generator)
    for part, (share, place) in zip(whole.split(outputs), places, strict=True):
        assert share is not None
        place.copy_(part[share.index])


def _load_checkpoint(
    decoder: Decoder, files: ModelFiles, scheme: Scheme | None = None, blocks: Path | None = None
) -> None:
    """Read the weights.

    Args:
        scheme: how they are quantised.
        blocks: the GGUF file whose blocks stay as they are.
    """
    tensors = list(stored_tensors(files.path))
    quantized = None
    if scheme is not None:
        by_name = {stored.name.removeprefix("model."): stored for stored in tensors}
        quantized = QuantizedLoader(decoder, checkpoint_modules, stored_parts(scheme, by_name))
    elif blocks is not None:
        config = decoder.config
        parts = gguf_parts(
            blocks,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            tied=config.tie_word_embeddings,
        )
        quantized = QuantizedLoader(decoder, checkpoint_modules, parts)
    places = dict(places_in(decoder))
    if quantized is not None:
        places = {name: place for name, place in places.items() if not quantized.holds(name)}
        places |= dict(quantized.places())
    placed, unused = match(places, tensors, f"checkpoint {files.path}", files.architecture)
    taken = [(place.share_of(stored), place) for stored, place in placed if place.takes]
    turns = [] if quantized is None else quantized.turns(taken, files.path)
    of_turns = {id(stored) for turn in turns for stored in turn.stored}
    dense = [(stored, place) for stored, place in taken if id(stored) not in of_turns]
    read_in_turns([turn_of(dense), *turns])
    if quantized is not None:
        quantized.finish(files.path)
        unused = [
            name
            for name in unused
            if not Scheme.UNUSED.search(name) and not quantized.holds(name.removeprefix("model."))
        ]
    if unused := [name for name in unused if not harmless(name, decoder)]:
        logger.warning(
            "%s: %d tensors of the checkpoint are not used (%s)", files.path, len(unused), few(unused)
        )
