"""One name for each tensor, whoever published the heads; and the layouts that are refused by theirs.

Canonical names, ``i`` a head and ``j`` one of its layers: ``blocks.i.j.weight``, ``blocks.i.j.bias``, the
output layer ``out.i.weight`` or, one for all heads, ``out.weight``; and ``token_map``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from specdecode.contract import ConfigError, Unsupported

#: Where heads stand beside other tensors: in the shards of their target, or in conversions for vLLM.
_PREFIX = re.compile(r"^(model\.)?medusa_heads?\.")
_OTHERS = re.compile(r"^(model\.)?(layers|embed_tokens)\.")

_FORMS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)"), lambda m: f"blocks.{m[1]}.{m[2]}.{m[3]}"),
    (re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)"), lambda m: f"blocks.{m[1]}.{m[2]}.{m[3]}"),
    (re.compile(r"(\d+)\.(\d+)\.weight"), lambda m: f"out.{m[1]}.weight"),
    (re.compile(r"lm_heads\.(\d+)\.weight"), lambda m: f"out.{m[1]}.weight"),
    (re.compile(r"lm_head\.weight"), lambda m: "out.weight"),
    (re.compile(r"token_map"), lambda m: "token_map"),
)

_REFUSED = (
    (r"hydra", "heads that read the drafts before them (Hydra)"),
    (r"(self_attn|prefix_layer|prefix_embedding)", "heads with attention of their own (Hydra++)"),
    (r"(qweight|qzeros|weight_scale|weight_packed|scale_inv)", "quantized weights"),
)

#: Public layout -> how it stores a canonical name; the last place of a head is its output layer's.
LAYOUTS: tuple[str, ...] = ("medusa-1", "medusa-2", "head-only", "vllm")


def canonical(name: str) -> str | None:
    """The one name of a stored tensor; None if it is none of Medusa's."""
    bare = _PREFIX.sub("", name)
    for form, named in _FORMS:
        if match := form.fullmatch(bare):
            return named(match)
    return None


def canonical_names(stored: Iterable[str], where: str) -> dict[str, str]:
    """Canonical name -> stored name.

    In a target's own shards only what bears the heads' prefix is looked at.

    Raises:
        Unsupported: a tensor belongs to a variant that is not built; names it.
        ConfigError: a tensor means nothing here, or two have one meaning.
    """
    stored = sorted(stored)
    if any(_OTHERS.match(name) for name in stored):
        stored = [name for name in stored if _PREFIX.match(name)]
    names: dict[str, str] = {}
    unknown: list[str] = []
    for name in stored:
        for pattern, variant in _REFUSED:
            if re.search(pattern, name):
                raise Unsupported(
                    f"{where} has {variant}, which is not supported: it holds the tensor {name}"
                )
        meaning = canonical(name)
        if meaning is None:
            unknown.append(name)
        elif other := names.get(meaning):
            raise ConfigError(f"{where} holds {other} and {name}, which mean the same; keep one")
        else:
            names[meaning] = name
    if unknown and names:
        raise ConfigError(
            f"{where} holds {unknown[0]}{' and others' if unknown[1:] else ''}, no tensor of Medusa heads"
        )
    return names


def output_layers(names: Mapping[str, str]) -> dict[int, int]:
    """Head -> the index under which the authors' layout stores its output layer: behind its last layer."""
    found = {}
    for meaning, stored in names.items():
        match = re.fullmatch(r"(\d+)\.(\d+)\.weight", _PREFIX.sub("", stored))
        if match and meaning.startswith("out."):
            found[int(match[1])] = int(match[2])
    return found


def stored_name(layout: str, name: str, num_layers: int) -> str:
    """How ``layout`` stores a canonical name.

    Args:
        num_layers: layers of a head, behind which the authors' layout counts its output layer.
    """
    kind, *rest = name.split(".")
    if layout == "vllm":
        if kind == "blocks":
            head, layer, part = rest
            return f"medusa_heads.blocks.{head}.layers.{layer}.{part}"
        if kind == "out":
            return f"medusa_heads.lm_heads.{rest[0]}.weight" if len(rest) == 2 else "lm_head.weight"
        return name
    prefix = "medusa_head." if layout == "medusa-2" else ""
    if kind == "blocks":
        head, layer, part = rest
        return f"{prefix}{head}.{layer}.linear.{part}"
    if kind == "out" and len(rest) == 2:
        return f"{prefix}{rest[0]}.{num_layers}.weight"
    raise ValueError(f"the layout {layout} has no place for {name}")


def layout_of(names: Mapping[str, str]) -> str:
    """The layout that a checkpoint's names are of."""
    if any(_PREFIX.sub("", stored).startswith(("blocks.", "lm_head")) for stored in names.values()):
        return "vllm"
    if any(_PREFIX.match(stored) for stored in names.values()):
        return "medusa-2"
    return "medusa-1" if any(name.startswith("out.") for name in names) else "head-only"
