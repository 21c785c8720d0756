"""Where each tensor of a checkpoint belongs in the native decoder."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, Self, TypeVar

import attrs
import torch

from specdecode.contract import ConfigError
from specdecode.distributed import Share
from specdecode.layers import RMSNorm, VocabEmbedding
from specdecode.layers.experts import ExpertsLinear
from specdecode.layers.linear import Linear

from .decoder import Decoder, DecoderLayer
from .experts import Router, expert_tensors, plain_name, published_name
from .transfer import Turn
from .weights import StoredTensor

#: Layers and heads that predict several tokens, and what turns images into vectors.
_EXTRA = re.compile(r"(model\.)?(mtp|mtp_layers|medusa_heads?|vision_model|connector)\.")

#: Fused module of a layer -> the checkpoint's modules that make it up, with their parts.
_SPLIT: dict[str, list[tuple[str, str]]] = {}
for _source, (_fused, _part) in DecoderLayer.FUSED.items():
    _SPLIT.setdefault(_fused, []).append((_source, _part))


class Named(Protocol):
    """A tensor of a checkpoint, read or not."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def part(self, share: Share) -> Self: ...


Tensor = TypeVar("Tensor", bound=Named)


@attrs.frozen(eq=False, kw_only=True)
class Place:
    """Where one tensor of a checkpoint belongs."""

    module: torch.nn.Module
    shape: tuple[int, ...]  #: of the whole tensor
    share: Share | None = None  #: what of it is this rank's; None: all
    destination: Callable[
        [], torch.Tensor
    ]  #: a contiguous view; of a packed layer only within its ``refilled``
    fills: tuple[
        str, ...
    ] = ()  #: names of the tensors in whose place it may come; none: it has one of its own

    @property
    def takes(self) -> bool:
        """Whether any of it is this rank's."""
        return self.share is None or self.share.size > 0

    def share_of(self, tensor: Tensor) -> Tensor:
        """Of a checkpoint's tensor what is this rank's."""
        return tensor if self.share is None or self.share.is_whole else tensor.part(self.share)

    def refilled(self) -> AbstractContextManager[None]:
        """Around what fills all places of the module anew."""
        refilled: Callable[[], AbstractContextManager[None]] = getattr(self.module, "refilled", nullcontext)
        return refilled()


def turn_of(entries: Sequence[tuple[StoredTensor, Place]], done: Callable[[], None] = lambda: None) -> Turn:
    """To read what is this rank's of some tensors, and then call ``done``."""
    return Turn(
        [stored for stored, _ in entries], lambda: [place.destination() for _, place in entries], done
    )


def match(
    places: Mapping[str, Place], tensors: Iterable[Tensor], whence: str, architecture: str
) -> tuple[list[tuple[Tensor, Place]], list[str]]:
    """Find the place of each tensor; nothing is read or written.

    Args:
        places: by the tensors' names without the prefix ``model.``.
        whence, architecture: what messages call the whole of ``tensors``, and the model.

    Returns:
        Each tensor that has a place, and the names of those that have none.

    Raises:
        ConfigError: tensors are missing, come twice, or have another shape.
    """
    missing = {key: None for key, place in places.items() if not place.fills}
    placed: dict[str, tuple[Tensor, Place]] = {}
    unused: list[str] = []
    published = False
    for tensor in tensors:
        key = plain_name(tensor.name.removeprefix("model.").removeprefix("text_model."))
        place = places.get(key)
        if key in placed:
            raise ConfigError(f"tensor {tensor.name} comes twice in the {whence}; give it once")
        if place is None:
            unused.append(tensor.name)
            continue
        if tensor.shape != place.shape:
            raise ConfigError(
                f"tensor {tensor.name} of the {whence} does not fit the model's config: "
                f"expected shape {list(place.shape)}, got {list(tensor.shape)}; "
                "see whether both are of one model"
            )
        placed[key] = tensor, place
        for name in place.fills or (key,):
            missing.pop(name, None)
        published |= plain_name(tensor.name) != tensor.name
    if missing:
        names = [published_name(name) for name in missing] if published else missing
        raise ConfigError(
            f"the {whence} lacks {len(missing)} tensors of {architecture} ({few(names)}); fetch or write it "
            "again, or see whether config.json is its own"
        )
    return list(placed.values()), unused


def few(names: Collection[str], limit: int = 4) -> str:
    """The first ``limit`` of ``names``."""
    shown = ", ".join(list(names)[:limit])
    return shown if len(names) <= limit else f"{shown}, ..."


def places_in(decoder: Decoder) -> Iterator[tuple[str, Place]]:
    """Every tensor a checkpoint may hold, named without the prefix ``model.``, and where it belongs."""
    for path, module in decoder.named_modules():
        if path == "lm_head" and decoder.config.tie_word_embeddings:
            continue
        match module:
            case Linear():
                yield from _of_linear(path, module)
            case ExpertsLinear():
                yield from _of_experts(path, module)
            case VocabEmbedding():
                yield f"{path}.weight", _shared(module, "weight")
            case RMSNorm() | Router():
                shape = tuple(module.weight.shape)
                yield f"{path}.weight", Place(module=module, shape=shape, destination=_weight_of(module))


def _weight_of(module: torch.nn.Module) -> Callable[[], torch.Tensor]:
    return lambda: module.weight.data  # type: ignore[operator, return-value]


def _of_linear(path: str, module: Linear) -> Iterator[tuple[str, Place]]:
    for source, part in checkpoint_modules(path):
        for kind, _ in module.named_parameters(recurse=False):
            if kind == "weight" and not module.allocated:
                continue  # it is stored quantised
            yield f"{source}.{kind}", _shared(module, kind, part)


def _shared(module: Linear | VocabEmbedding, kind: str, part: str | None = None) -> Place:
    return Place(
        module=module,
        shape=module.shape(kind, part),
        share=module.share(kind, part),
        destination=functools.partial(module.destination, kind, part),
    )


def _of_experts(path: str, module: ExpertsLinear) -> Iterator[tuple[str, Place]]:
    """Of each expert, or those of all experts stacked."""
    names = []
    for name, (expert, part) in expert_tensors(path, module):
        names.append(name)
        destination = functools.partial(module.destination, expert, part)
        shape, share = module.shape(expert, part), module.share(part)
        yield name, Place(module=module, shape=shape, share=share, destination=destination)
    block, _, own = path.rpartition(".")
    yield (
        f"{block}.experts.{own}",
        Place(module=module, shape=module.shape(), destination=module.destination, fills=tuple(names)),
    )


def checkpoint_modules(path: str) -> list[tuple[str, str | None]]:
    """The checkpoint modules, each with its part, that the decoder's module at ``path`` is made of."""
    for fused, sources in _SPLIT.items():
        if path.endswith(f".{fused}"):
            layer = path.removesuffix(fused)
            return [(layer + source, part) for source, part in sources]
    return [(path, None)]


def harmless(name: str, decoder: Decoder) -> bool:
    """Whether a tensor without a place is none that somebody may miss."""
    if _EXTRA.match(name):  # beside the body; whoever drafts with them reads them
        return True
    tied = decoder.config.tie_word_embeddings and name == "lm_head.weight"
    return tied or name.endswith("rotary_emb.inv_freq")
