"""From model files to a decoder with weights."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Collection, Iterator

import torch

from specdecode.contract import ConfigError
from specdecode.distributed import SOLO, Group, Share
from specdecode.layers import RMSNorm, RotatingBackend, VocabEmbedding
from specdecode.layers.experts import ExpertsLinear
from specdecode.layers.linear import Linear, without_weights

from .decoder import Decoder, DecoderLayer
from .experts import Router, check_experts, expert_tensors, plain_name, published_name
from .families import decoder_config
from .files import ModelFiles
from .packing import check_quantization, pack_weights
from .quantized import QuantizedLoader, Scheme, randomize_quantized, read_scheme
from .sharing import check_shareable
from .transfer import Copy, read_weights
from .transformers_backend import TransformersDecoder
from .transformers_support import check_architecture, is_native, load
from .weights import stored_tensors

logger = logging.getLogger(__name__)

#: Standard deviation and seed of dummy weights.
_DUMMY_STD = 0.02
_DUMMY_SEED = 0

#: Layers and heads that predict several tokens.
_EXTRA = re.compile(r"(model\.)?(mtp|mtp_layers|medusa_heads?)\.")

#: Fused module of a layer -> the checkpoint's modules that make it up, with their parts.
_SPLIT: dict[str, list[tuple[str, str]]] = {}
for _source, (_fused, _part) in DecoderLayer.FUSED.items():
    _SPLIT.setdefault(_fused, []).append((_source, _part))


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
    check_quantization(quantization, dtype, device)
    check_experts(config, dtype, device)
    if scheme is not None:
        _check_scheme(scheme, files, quantization=quantization, experts=config.experts is not None)
    with contextlib.nullcontext() if scheme is None else without_weights():
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
        _load_checkpoint(decoder, files, scheme)
    pack_weights(decoder, quantization=quantization, exact=exact)
    return decoder.eval()


def _check_scheme(scheme: Scheme, files: ModelFiles, *, quantization: str | None, experts: bool) -> None:
    """Refuse what a quantised checkpoint does not go with."""
    if quantization is not None:
        raise ConfigError(
            f"quantization={quantization!r} makes quantised weights of plain ones, and model {files.name!r} "
            f"is quantized already ({scheme.method}): leave quantization out"
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


def _load_checkpoint(decoder: Decoder, files: ModelFiles, scheme: Scheme | None = None) -> None:
    tensors = list(stored_tensors(files.path))
    quantized = None
    if scheme is not None:
        by_name = {stored.name.removeprefix("model."): stored for stored in tensors}
        quantized = QuantizedLoader(decoder, scheme, checkpoint_modules, by_name)
    expected, stacked = dict(_expected(decoder)), dict(_stacked(decoder))
    if quantized is not None:
        expected = {name: own for name, own in expected.items() if not quantized.holds(name)}
        expected |= quantized.destinations()
    missing, published = dict.fromkeys(expected), False
    unused: list[str] = []
    copies: list[Copy] = []
    for stored in tensors:
        key = plain_name(stored.name.removeprefix("model."))
        filled = stacked[key][1] if key in stacked else [key]
        found = stacked[key][0] if key in stacked else expected.get(key)
        if found is None:
            unused.append(stored.name)
            continue
        destination, share = found
        shape = _whole_shape(destination, share)
        if stored.shape != shape:
            raise ConfigError(
                f"tensor {stored.name} of the checkpoint {files.path} does not fit its config.json: "
                f"expected shape {list(shape)}, got {list(stored.shape)}; "
                "see whether both are of one model"
            )
        if share is None or share.is_whole:
            copies.append((stored, destination))
        elif share.size:
            copies.append((stored.part(share), destination))
        for name in filled:
            missing.pop(name, None)
        published |= plain_name(stored.name) != stored.name
    if missing:
        names = [published_name(name) for name in missing] if published else missing
        raise ConfigError(
            f"the checkpoint {files.path} lacks {len(missing)} tensors of {files.architecture} "
            f"({_few(names)}); fetch it again, or see whether config.json is its own"
        )
    read_weights(copies)
    if quantized is not None:
        quantized.finish(files.path)
        unused = [name for name in unused if not Scheme.UNUSED.search(name)]
    if unused := [name for name in unused if not _harmless(name, decoder)]:
        logger.warning(
            "%s: %d tensors of the checkpoint are not used (%s)", files.path, len(unused), _few(unused)
        )


def _whole_shape(destination: torch.Tensor, share: Share | None) -> tuple[int, ...]:
    shape = list(destination.shape)
    if share is not None:
        shape[share.dim] = share.whole
    return tuple(shape)


def _expected(decoder: Decoder) -> Iterator[tuple[str, tuple[torch.Tensor, Share | None]]]:
    """Every tensor a checkpoint must hold, named without the prefix ``model.``: where what of it belongs."""
    for path, module in decoder.named_modules():
        if isinstance(module, ExpertsLinear):
            yield from ((name, (place, None)) for name, place in expert_tensors(path, module))
        if not isinstance(module, (Linear, RMSNorm, Router, VocabEmbedding)):
            continue
        if path == "lm_head" and decoder.config.tie_word_embeddings:
            continue
        for source, part in checkpoint_modules(path):
            for kind, parameter in module.named_parameters(recurse=False):
                if isinstance(module, RMSNorm | Router):
                    yield f"{source}.{kind}", (parameter.data, None)
                elif isinstance(module, Linear) and kind == "weight" and not module.allocated:
                    continue  # it is stored quantised
                else:
                    yield f"{source}.{kind}", (module.destination(kind, part), module.share(kind, part))


def _stacked(decoder: Decoder) -> Iterator[tuple[str, tuple[tuple[torch.Tensor, None], list[str]]]]:
    """Tensors of all experts of a layer, as of :func:`_expected`, and those that each is in the place of."""
    for path, module in decoder.named_modules():
        if isinstance(module, ExpertsLinear):
            block, _, name = path.rpartition(".")
            names = [own for own, _ in expert_tensors(path, module)]
            yield f"{block}.experts.{name}", ((module.destination(), None), names)


def checkpoint_modules(path: str) -> list[tuple[str, str | None]]:
    """The checkpoint modules, each with its part, that the decoder's module at ``path`` is made of."""
    for fused, sources in _SPLIT.items():
        if path.endswith(f".{fused}"):
            layer = path.removesuffix(fused)
            return [(layer + source, part) for source, part in sources]
    return [(path, None)]


def _harmless(name: str, decoder: Decoder) -> bool:
    if _EXTRA.match(name):  # beside the body; whoever drafts with them reads them
        return True
    tied = decoder.config.tie_word_embeddings and name == "lm_head.weight"
    return tied or name.endswith("rotary_emb.inv_freq")


def _few(names: Collection[str], limit: int = 4) -> str:
    shown = ", ".join(list(names)[:limit])
    return shown if len(names) <= limit else f"{shown}, ..."
