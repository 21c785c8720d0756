"""Fills a decoder from a quantised checkpoint: which tensors are read, and what becomes of them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import attrs
import torch
from specdec_kernels.quantized import QuantizedMatrix

from specdecode.contract import ConfigError
from specdecode.layers.linear import Linear

from ..decoder import Decoder
from ..placing import Place, turn_of
from ..transfer import Turn
from ..weights import StoredTensor
from .form import QuantizedForm, form_of
from .scheme import Layout, Scheme

logger = logging.getLogger(__name__)

#: Bytes of a checkpoint that are read together, at the least.
_TURN_BYTES = 1 << 30

#: Modules of a checkpoint, each with its part, that a module of the decoder is made of.
Sources = Callable[[str], list[tuple[str, str | None]]]


class Part(Protocol):
    """A part of a layer that is stored quantised.

    Attributes:
        name: of the module in the checkpoint.
        part: of the layer; None: all of it.
        tensors: what is read from safetensors, by the last part of their names: filled by the loader.
    """

    name: str
    part: str | None
    tensors: dict[str, torch.Tensor]

    def matrix(self, outputs: int, inputs: int) -> QuantizedMatrix:
        """What was read; ValueError or KeyError where it does not fit."""


#: The quantised part that a module of the checkpoint is, given its name and the layer's part; None: it is
#: not.
Finder = Callable[[str, str | None], Part | None]


@attrs.define(eq=False)
class _StoredPart:
    name: str
    part: str | None
    layout: Layout
    tensors: dict[str, torch.Tensor]

    def matrix(self, outputs: int, inputs: int) -> QuantizedMatrix:
        return self.layout.matrix(self.tensors, outputs, inputs)


class QuantizedLoader:
    """Linear layers whose parts are stored quantised, between the plan of what is read and its use.

    The weights of such layers are never allocated in the model's dtype. A layer of which only some parts are
    quantised, or each in another way, is dequantised.
    """

    def __init__(self, decoder: Decoder, sources: Sources, find: Finder) -> None:
        self._decoder = decoder
        self._layers: dict[str, list[Part]] = {}
        self._held: set[str] = set()
        self._names: dict[torch.nn.Module, str] = {}  #: of layers that are still to be made
        self._dequantised: dict[str, str] = {}  #: why
        for path, layer in _layers_to_fill(decoder):
            owners = sources(path)
            parts = [part for part in (find(*owner) for owner in owners) if part is not None]
            if len(parts) < len(owners):
                layer.allocate(decoder.device)
            if parts:
                self._layers[path] = parts
                self._names[layer] = path
                self._held.update(f"{part.name}.weight" for part in parts)

    def places(self) -> Iterator[tuple[str, Place]]:
        """Names of the tensors that are to be read whole, without ``model.``, and where they belong."""
        for name, parts in self._layers.items():
            layer = self._decoder.get_submodule(name)
            for part in parts:
                for kind, tensor in part.tensors.items():
                    destination = functools.partial(self._allocate, part, kind)
                    place = Place(module=layer, shape=tuple(tensor.shape), destination=destination)
                    yield f"{part.name}.{kind}", place

    def _allocate(self, part: Part, kind: str) -> torch.Tensor:
        part.tensors[kind] = tensor = torch.empty_like(part.tensors[kind], device=self._decoder.device)
        return tensor

    def turns(self, placed: Iterable[tuple[StoredTensor, Place]], path: Path) -> list[Turn]:
        """Some layers at a time, which are made before others are read: what of ``placed`` is theirs.

        So no more is held whole, or as it is stored, than one turn's.
        """
        stored: dict[torch.nn.Module, list[tuple[StoredTensor, Place]]] = {}
        for tensor, place in placed:
            if place.module in self._names:
                stored.setdefault(place.module, []).append((tensor, place))
        turns: list[Turn] = []
        entries: list[tuple[StoredTensor, Place]] = []
        modules: list[torch.nn.Module] = []
        for module in self._names:
            entries += stored.get(module, [])
            modules.append(module)
            if sum(tensor.num_bytes for tensor, _ in entries) >= _TURN_BYTES:
                turns.append(turn_of(entries, functools.partial(self._make, modules, path)))
                entries, modules = [], []
        return [*turns, turn_of(entries, functools.partial(self._make, modules, path))]

    def _make(self, modules: Iterable[torch.nn.Module], path: Path) -> None:
        for module in modules:
            self._make_layer(self._names.pop(module), path)

    def holds(self, name: str) -> bool:
        """Whether it is the name of a dense weight whose place a quantised one takes."""
        return name in self._held

    def finish(self, path: Path) -> None:
        """Make the layers that are left; ConfigError names a tensor that does not fit."""
        self._make(list(self._names), path)
        if self._dequantised:
            name, reason = next(iter(self._dequantised.items()))
            logger.warning(
                "%s: %d layers are dequantised, and take the memory of dense ones (%s: %s)",
                path, len(self._dequantised), name, reason,
            )  # fmt: skip

    def _make_layer(self, name: str, path: Path) -> None:
        parts, layer = self._layers[name], self._decoder.get_submodule(name)
        assert isinstance(layer, Linear)
        matrices = []
        for part in parts:
            share = layer.share("weight", part.part)
            rows, inputs = layer.destination_rows(part.part), layer.in_features
            if share is not None:
                rows, inputs = (share.whole, inputs) if share.dim == 0 else (rows, share.whole)
            try:
                matrix = part.matrix(rows, inputs)
            except (ValueError, KeyError, RuntimeError) as error:
                said = f"{error} is missing" if isinstance(error, KeyError) else str(error)
                raise ConfigError(
                    f"module {part.name} of the checkpoint {path} does not fit its quantization_config: "
                    f"{said}; see whether both are of one model"
                ) from error
            if share is not None:
                try:
                    matrix = matrix.narrowed(share.dim, share.start, share.size)
                except ValueError as error:
                    raise ConfigError(
                        f"module {part.name} of the checkpoint {path} cannot be shared out by "
                        f"tensor_parallel_size: {error}; use fewer devices or other groups"
                    ) from error
            matrices.append(matrix)
            part.tensors.clear()
        if reason := self._hold(layer, parts, matrices):
            self._dequantised[name] = reason

    def _hold(self, layer: Linear, parts: list[Part], matrices: list[QuantizedMatrix]) -> str | None:
        whole = None
        reason = "only some of its parts are quantised"
        if not layer.allocated or _tied(self._decoder, layer):
            whole, reason = QuantizedMatrix.stacked(matrices), "its parts are quantised in different ways"
        if whole is not None:
            form: QuantizedForm | str = "ranks have parts of different sizes"
            if whole.codes.shape[0] == layer.out_features:
                form = form_of(whole, self._decoder.dtype, fused=self._decoder.fused)
            if not isinstance(form, str):
                layer.hold(form(whole, layer.form_bias))
                return None
            reason = form
        if _tied(self._decoder, layer):
            return reason  # the embedding's table is its weight
        layer.allocate(self._decoder.device)
        for part, matrix in zip(parts, matrices, strict=True):
            layer.destination("weight", part.part).copy_(matrix.dequantized())
        return reason


def randomize_quantized(decoder: Decoder, scheme: Scheme, sources: Sources, *, std: float, seed: int) -> None:
    """Random quantised weights in the layers that the scheme names; the others become allocated."""
    generator = torch.Generator(decoder.device).manual_seed(seed)
    for path, layer in _layers_to_fill(decoder):
        if layer.allocated:
            continue
        layouts = [scheme.layout_of(source, ignoring=True) for source, _ in sources(path)]
        layout = layouts[0]
        if layout is None or any(other is None or other != layout for other in layouts):
            layer.allocate(decoder.device)
            continue
        groups = layout.groups(layer.in_features)
        matrix = QuantizedMatrix.random(
            layout.kind, layer.out_features, layer.in_features, groups, std=std, generator=generator
        )
        form = form_of(matrix, decoder.dtype, fused=decoder.fused)
        if isinstance(form, str):
            layer.allocate(decoder.device)
            layer.weight.data.copy_(matrix.dequantized())
        else:
            layer.hold(form(matrix, layer.form_bias))


def _layers_to_fill(decoder: Decoder) -> Iterator[tuple[str, Linear]]:
    """Layers without a weight; an output layer may have the embedding's, and be given a form of its own."""
    for path, module in decoder.named_modules():
        if isinstance(module, Linear) and (not module.allocated or _tied(decoder, module)):
            yield path, module


def _tied(decoder: Decoder, layer: Linear) -> bool:
    return layer.weight is decoder.embed_tokens.weight


def stored_parts(scheme: Scheme, stored: Mapping[str, StoredTensor]) -> Finder:
    """The parts of a safetensors checkpoint, whose tensors are named without ``model.``."""

    def find(name: str, part: str | None) -> Part | None:
        layout = scheme.layout_of(name)
        if layout is None or f"{name}.{layout.key}" not in stored:
            return None
        kinds = dict.fromkeys((layout.key, *layout.others))
        found = {kind: stored[f"{name}.{kind}"] for kind in kinds if f"{name}.{kind}" in stored}
        tensors = {
            kind: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for kind, tensor in found.items()
        }
        return _StoredPart(name, part, layout, tensors)

    return find
