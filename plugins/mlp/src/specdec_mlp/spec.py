"""A speculator as its checkpoint describes it: sizes from the tensors, from config.json what they leave."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from specdecode.contract import CheckpointInfo, ConfigError, TargetInfo, TensorInfo, Unsupported
from specdecode.heads.tokenizers import check_tokenizer
from specdecode.heads.vocabulary import is_padding

from .layouts import PREFIX, canonical_names, source

#: Of the published config class.
_DEFAULT_N_PREDICT = 3


@attrs.frozen(kw_only=True, eq=False)
class SpeculatorSpec:
    """All that building the speculator takes."""

    path: Path
    dummy: bool  #: there are no weights to be read, random ones will do
    names: Mapping[str, str]  #: canonical name -> stored name, of those that are used
    n_predict: int  #: steps that it was trained for; its scalings follow from it
    hidden_size: int  #: the target's
    inner_size: int
    tied: bool
    scale_input: bool
    rows: int  #: of embeddings and output layers that are used
    vocab_size: int  #: the target's


def read_speculator(draft: CheckpointInfo, target: TargetInfo) -> SpeculatorSpec:
    """Judge a checkpoint against the method and the target.

    Raises:
        Unsupported: a variant that is not built.
        ConfigError: missing tensors, wrong shapes, another vocabulary, a config that does not fit.
    """
    where = f"the checkpoint {draft.path}"
    if draft.dummy:
        draft = attrs.evolve(draft, tensors=_dummy_tensors(draft.config, target, where))
    config = draft.config
    if (method := config.get("method")) not in (None, "sum_rnn"):
        raise Unsupported(f"{where} says method={method!r}, which is not supported: only the MLP is")
    names = canonical_names(draft.tensors, where)
    steps = {int(name.split(".")[1]) for name in names if name.startswith("emb.")}
    n_predict = _count(config, "n_predict", max(steps) + 1 if len(steps) > 1 else _DEFAULT_N_PREDICT, where)
    tied = _tied(config, names, steps, n_predict, where)
    if not tied and steps and max(steps) >= n_predict:
        raise ConfigError(
            f"{where}: its config says n_predict={n_predict}, and it holds {max(steps) + 1} steps: the "
            "scalings follow from n_predict, so it must be right"
        )
    wanted = _wanted(n_predict)
    used = {source(name, tied=tied) for name in wanted}
    if missing := sorted(used - names.keys()):
        shown = ", ".join(PREFIX + name for name in missing[:4])
        raise ConfigError(
            f"{where} lacks {len(missing)} tensors of an MLP speculator of {n_predict} steps with "
            f"{'' if tied else 'un'}tied weights ({shown}{', ...' if missing[4:] else ''}); fetch it again, "
            "or see whether n_predict and tie_weights are right"
        )
    shapes = {name: draft.tensors[names[name]].shape for name in used}
    inner = _inner(config, shapes, target, where)
    _check_shapes(shapes, names, inner, target, where)
    rows = min(shapes["emb.0.weight"][0], target.vocab_size)
    top_k = config.get("top_k_tokens_per_head")
    if top_k is not None and (not isinstance(top_k, list) or len(top_k) != n_predict):
        raise ConfigError(
            f"{where}: top_k_tokens_per_head must list one number for each of n_predict={n_predict} steps, "
            f"got {top_k!r}"
        )
    check_tokenizer(draft.path, target.path, where)
    return SpeculatorSpec(
        path=draft.path,
        dummy=draft.dummy,
        names={name: names[name] for name in used},
        n_predict=n_predict,
        hidden_size=target.hidden_size,
        inner_size=inner,
        tied=tied,
        scale_input=_flag(config, "scale_input", where) or False,
        rows=rows,
        vocab_size=target.vocab_size,
    )


def _dummy_tensors(config: Mapping[str, Any], target: TargetInfo, where: str) -> dict[str, TensorInfo]:
    """What the published layout would hold by its config alone: what is timed with random weights."""
    steps = _count(config, "n_predict", _DEFAULT_N_PREDICT, where)
    inner = (
        _count(config, "inner_dim", target.hidden_size, where)
        if config.get("inner_dim")
        else target.hidden_size
    )
    table = (target.vocab_size, inner)
    shapes = {"emb": table, "head": table, "ln": (inner,)}
    tensors = {}
    for name in _wanted(steps):
        kind, step, _ = name.split(".")
        shape = shapes.get(kind, (inner, inner if int(step) else target.hidden_size))
        tensors[PREFIX + name] = TensorInfo(shape, target.dtype)
    return tensors


def _tied(
    config: Mapping[str, Any], names: Mapping[str, str], steps: set[int], n_predict: int, where: str
) -> bool:
    said = _flag(config, "tie_weights", where)
    if said is not None:
        return said
    return n_predict > 1 and steps == {0} and "proj.2.weight" not in names


def _wanted(n_predict: int) -> list[str]:
    parts = ("emb.{}.weight", "proj.{}.weight", "head.{}.weight", "ln.{}.weight", "ln.{}.bias")
    return [part.format(step) for step in range(n_predict) for part in parts]


def _inner(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], target: TargetInfo, where: str
) -> int:
    entry = shapes["proj.0.weight"]
    hidden = target.hidden_size
    said = config.get("emb_dim", config.get("hidden_size"))
    if len(entry) != 2 or entry[1] != hidden or said not in (None, hidden):
        found = said if len(entry) == 2 and entry[1] == hidden else entry[-1]
        raise ConfigError(f"{where} is for a target of hidden size {found}, this one has {hidden}")
    inner = entry[0]
    announced = config.get("inner_dim")
    if announced is not None and (announced or hidden) != inner:
        raise ConfigError(f"{where}: its config says inner_dim={announced!r}, proj.0.weight has {inner} rows")
    return inner


def _check_shapes(
    shapes: Mapping[str, tuple[int, ...]],
    names: Mapping[str, str],
    inner: int,
    target: TargetInfo,
    where: str,
) -> None:
    rows = shapes["emb.0.weight"][0]
    if rows != target.vocab_size and not is_padding(rows, target.vocab_size):
        raise ConfigError(
            f"{where} is for another vocabulary: emb.0.weight has {rows} rows, the target has "
            f"{target.vocab_size} tokens"
        )
    for name, shape in shapes.items():
        kind, step, _ = name.split(".")
        wanted = {
            "emb": (rows, inner),
            "head": (rows, inner),
            "proj": (inner, inner if int(step) else target.hidden_size),
            "ln": (inner,),
        }[kind]
        if shape != wanted:
            raise ConfigError(f"{where}: {names[name]} has shape {list(shape)}, expected {list(wanted)}")


def _count(config: Mapping[str, Any], key: str, default: int, where: str) -> int:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{where}: {key} must be an integer of at least 1, got {value!r}")
    return value


def _flag(config: Mapping[str, Any], key: str, where: str) -> bool | None:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{where}: {key} must be true or false, got {value!r}")
    return value
