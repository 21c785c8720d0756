"""Heads as their checkpoint describes them: by the tensors first, by config.json second."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import attrs
import numpy as np
from specdecode.contract import CheckpointInfo, ConfigError, TargetInfo, TensorInfo
from specdecode.heads.tokenizers import check_tokenizer
from specdecode.heads.topology import parse_tree
from specdecode.heads.vocabulary import draft_ids, is_padding

from .layouts import canonical_names, layout_of, output_layers, stored_name

_BLOCK = re.compile(r"blocks\.(\d+)\.(\d+)\.(weight|bias)")
_OUT = re.compile(r"out\.(\d+)\.weight")
#: Key of ``config.json`` with the nodes of a tree, by merit; written by ``specdecode train``.
CHOICES = "medusa_choices"


@attrs.frozen(kw_only=True, eq=False)
class HeadsSpec:
    """All that building the heads takes; nothing of their weights but the map of a reduced vocabulary."""

    path: Path
    dummy: bool  #: there are no weights to be read, random ones will do
    names: Mapping[str, str]  #: canonical name -> stored name
    num_heads: int
    num_layers: int  #: of each head
    hidden_size: int
    bias: bool
    output: Literal["own", "shared", "target"]  #: of whom the output layers are
    rows: int | None  #: of an output layer that is stored; None: the target's is used
    vocab_size: int  #: the target's
    draft_ids: np.ndarray | None  #: ``[Vd]``: the target's id of each row; None: they are the same
    logit_scale: float
    choices: tuple[tuple[int, ...], ...] | None  #: the tree that the checkpoint proposes, by merit


def read_heads(draft: CheckpointInfo, target: TargetInfo) -> HeadsSpec:
    """Judge a checkpoint against the method and the target.

    Raises:
        Unsupported: a variant that is not built.
        ConfigError: missing tensors, wrong shapes, a map that points outside, another tokenizer.
    """
    where = f"the checkpoint {draft.path}"
    if draft.dummy:
        draft = attrs.evolve(draft, tensors=_dummy_tensors(draft.config, target, where))
    names = canonical_names(draft.tensors, where)
    shapes = {name: draft.tensors[stored].shape for name, stored in names.items()}
    blocks = [match for name in names if (match := _BLOCK.fullmatch(name))]
    if not blocks:
        raise ConfigError(
            f"{where} holds no Medusa heads (0.0.linear.weight and so on): see whether it is the right one"
        )
    num_heads = 1 + max(int(match[1]) for match in blocks)
    num_layers = 1 + max(int(match[2]) for match in blocks)
    bias = any(match[3] == "bias" for match in blocks)
    output = _output(draft.config, names, num_heads, num_layers, where)
    _complete(names, num_heads, num_layers, bias=bias, own=output == "own", where=where)
    hidden = _hidden(draft, shapes, names, target, where)
    rows = None
    ids = None
    if output != "target":
        rows, ids = _vocabulary(draft, names, shapes, hidden, target, where)
    elif "token_map" in names:
        ids = draft_ids(draft, names, None, target.vocab_size, where)
    if draft.path != Path(target.path):
        check_tokenizer(draft.path, target.path, where)
    return HeadsSpec(
        path=draft.path,
        dummy=draft.dummy,
        names=names,
        num_heads=num_heads,
        num_layers=num_layers,
        hidden_size=hidden,
        bias=bias,
        output=output,
        rows=rows,
        vocab_size=target.vocab_size,
        draft_ids=ids,
        logit_scale=_number(draft.config, "logit_scale", 1.0, where),
        choices=_choices(draft.config, where),
    )


def _dummy_tensors(config: Mapping[str, Any], target: TargetInfo, where: str) -> dict[str, TensorInfo]:
    """What the authors' layout would hold by its config alone: what is timed with random weights."""
    heads = _count(config, "medusa_num_heads", "num_heads", where)
    layers = _count(config, "medusa_num_layers", "num_hidden_layers", where)
    hidden, tensors = target.hidden_size, {}
    for head in range(heads):
        for layer in range(layers):
            tensors[f"{head}.{layer}.linear.weight"] = TensorInfo((hidden, hidden), target.dtype)
            tensors[f"{head}.{layer}.linear.bias"] = TensorInfo((hidden,), target.dtype)
        if config.get("version") != "2":
            tensors[f"{head}.{layers}.weight"] = TensorInfo((target.vocab_size, hidden), target.dtype)
    return tensors


def _count(config: Mapping[str, Any], key: str, other: str, where: str) -> int:
    value = config.get(key, config.get(other, 1 if key == "medusa_num_layers" else None))
    if type(value) is not int or value < 1:
        raise ConfigError(
            f"{where} has no weights, and its config no {key}: it must be at least 1, got {value!r}"
        )
    return value


def _output(
    config: Mapping[str, Any], names: Mapping[str, str], num_heads: int, num_layers: int, where: str
) -> Literal["own", "shared", "target"]:
    """Whose output layers the heads have; their count and place are checked."""
    for head, layer in output_layers(names).items():
        if layer != num_layers:
            raise ConfigError(
                f"{where} holds {names[f'out.{head}.weight']}, which should be the output layer behind "
                f"layer {num_layers - 1} of head {head}: layers are missing, or of another layout"
            )
    own = sorted(int(match[1]) for name in names if (match := _OUT.fullmatch(name)))
    if own and own[-1] >= num_heads:
        raise ConfigError(
            f"{where} has an output layer of head {own[-1]}, and layers of {num_heads} heads only"
        )
    if config.get("original_lm_head") and (own == [0] or "out.weight" in names):
        return "shared"
    if own:
        return "own"
    return "shared" if "out.weight" in names else "target"


def _complete(
    names: Mapping[str, str], num_heads: int, num_layers: int, *, bias: bool, own: bool, where: str
) -> None:
    kinds = ("weight", "bias") if bias else ("weight",)
    wanted = [
        f"blocks.{head}.{layer}.{kind}"
        for head in range(num_heads)
        for layer in range(num_layers)
        for kind in kinds
    ]
    if own:
        wanted += [f"out.{head}.weight" for head in range(num_heads)]
    if missing := [name for name in wanted if name not in names]:
        layout = layout_of(names)
        shown = ", ".join(stored_name(layout, name, num_layers) for name in missing[:4])
        raise ConfigError(
            f"{where} lacks {len(missing)} tensors of its {num_heads} Medusa heads ({shown}"
            f"{', ...' if missing[4:] else ''}); fetch it again"
        )


def _hidden(
    draft: CheckpointInfo,
    shapes: Mapping[str, tuple[int, ...]],
    names: Mapping[str, str],
    target: TargetInfo,
    where: str,
) -> int:
    hidden = target.hidden_size
    said = draft.config.get("hidden_size")
    found = shapes["blocks.0.0.weight"][-1]
    if found != hidden or said not in (None, found):
        raise ConfigError(
            f"{where} is for a target of hidden size {found if found != hidden else said}, this one has "
            f"{hidden}"
        )
    for name, shape in shapes.items():
        if name.startswith("blocks."):
            wanted = (hidden, hidden) if name.endswith(".weight") else (hidden,)
            if shape != wanted:
                raise ConfigError(f"{where}: {names[name]} has shape {list(shape)}, expected {list(wanted)}")
    return hidden


def _vocabulary(
    draft: CheckpointInfo,
    names: dict[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    hidden: int,
    target: TargetInfo,
    where: str,
) -> tuple[int, np.ndarray | None]:
    """Rows of the output layers that are used, and the target's id of each."""
    stored = {name: shape for name, shape in shapes.items() if name.startswith("out.")}
    first = next(iter(stored.values()))
    for name, shape in stored.items():
        if shape != first or len(shape) != 2 or shape[1] != hidden:
            raise ConfigError(
                f"{where}: {names[name]} has shape {list(shape)}, expected {[first[0], hidden]}"
            )
    ids = draft_ids(draft, names, None, target.vocab_size, where)
    kept = target.vocab_size if ids is None else len(ids)
    if first[0] == kept or is_padding(first[0], target.vocab_size):
        return min(first[0], kept), ids  # a whole layer is cut to the tokens that the map keeps
    if "token_map" in names:
        raise ConfigError(
            f"{where}: {names['token_map']} keeps {kept} tokens, and the output layers have {first[0]} rows: "
            f"neither as many nor the target's {target.vocab_size}"
        )
    raise ConfigError(
        f"{where} is for another vocabulary: its output layers have {first[0]} rows and no token_map, the "
        f"target has {target.vocab_size} tokens"
    )


def _number(config: Mapping[str, Any], key: str, default: float, where: str) -> float:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ConfigError(f"{where}: {key} must be a positive number, got {value!r}")
    return float(value)


def _choices(config: Mapping[str, Any], where: str) -> tuple[tuple[int, ...], ...] | None:
    value = config.get(CHOICES)
    if value is None:
        return None
    try:
        return tuple(parse_tree(value))
    except ValueError as error:
        raise ConfigError(f"{where}: {CHOICES} of its config {error}") from None
