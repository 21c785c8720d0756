"""How multi-token-prediction layers are stored: found by their tensors' names, given one name each.

The one names are ``embedding_norm``, ``hidden_norm``, ``projection``, ``final_norm`` (each ``.weight``) and,
of the ordinary layer between them, ``block.`` and what the model's own layers call it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import attrs
from specdecode.contract import CheckpointInfo, ConfigError, Match, Unsupported

#: Of every module, beside its block.
NORMS = ("embedding_norm.weight", "hidden_norm.weight", "final_norm.weight")
PROJECTION = "projection.weight"


@attrs.frozen(kw_only=True)
class Layout:
    """One way to store modules."""

    name: str
    prefix: re.Pattern[str]  #: of a module's tensors; its group is the module's number
    parts: Mapping[str, str]  #: stored name behind the prefix -> the one name
    copies: frozenset[str] = frozenset()  #: of the target's tables, which are used instead
    hidden_first: bool  #: the order in which the projection takes hidden state and embedding

    def canonical(self, rest: str) -> str:
        """The one name of what is stored as ``rest`` behind the prefix."""
        return self.parts.get(rest, f"block.{rest}")


_MIMO_PARTS = {
    "token_layernorm.weight": "embedding_norm.weight",
    "hidden_layernorm.weight": "hidden_norm.weight",
    "input_proj.weight": PROJECTION,
    "final_layernorm.weight": "final_norm.weight",
}
MIMO = Layout(
    name="MiMo",
    prefix=re.compile(r"^(?:model\.)?mtp_layers\.(\d+)\."),
    parts=_MIMO_PARTS,
    hidden_first=True,
)
#: MiMo's names, but not its order.
SPECULATORS = attrs.evolve(MIMO, name="speculators", hidden_first=False)
NEXTN = Layout(
    name="DeepSeek-V3 and GLM",
    prefix=re.compile(r"^(?:model\.)?layers\.(\d+)\."),
    parts={
        "enorm.weight": "embedding_norm.weight",
        "hnorm.weight": "hidden_norm.weight",
        "eh_proj.weight": PROJECTION,
        "shared_head.norm.weight": "final_norm.weight",
    },
    copies=frozenset({"embed_tokens.weight", "shared_head.head.weight"}),
    hidden_first=False,
)

_RECURRENT = (
    "Qwen3-Next and Qwen3.5: the linear-attention layers of such a target keep a recurrent state, which "
    "cannot be rolled back when drafts are rejected"
)
#: Names that tell a format that is not built.
_REFUSED = (
    (r"^mtp\.(fc|pre_fc_norm_\w+)\.", _RECURRENT),
    (r"^mtp\.(layers\.)?\d+\.(e_proj|h_proj)\.", "DeepSeek-V4, which mixes several residual streams"),
    (r"^layers\.\d+\.(e_proj|h_proj)\.", "DeepSeek-V4, which mixes several residual streams"),
    (r"^mtp\.(layers\.)?\d+\.(enorm|hnorm|eh_proj)\.", "MiMo-V2, whose layers are of another format"),
    (r"^mtp_(block|emb_norm|hidden_norm|linear_proj)\.", "ERNIE 4.5"),
)
#: The same, of a module's own tensors.
_REFUSED_BLOCKS = (
    (r"self_attn\.indexer\.", "sparse attention by an indexer (DeepSeek-V3.2, GLM-5)"),
    (r"(qweight|qzeros|weight_scale|weight_packed|scale_inv|absmax)", "quantized weights"),
)


@attrs.frozen(kw_only=True)
class Modules:
    """The modules that a checkpoint holds: the one name -> the stored name, for each."""

    layout: Layout
    names: tuple[Mapping[str, str], ...]


def find_modules(checkpoint: CheckpointInfo, where: str) -> Modules | None:
    """What a checkpoint holds of multi-token-prediction layers; None: nothing.

    Args:
        where: what messages call it.

    Raises:
        Unsupported: a format that is not built; names a tensor of it.
        ConfigError: modules are missing in between.
    """
    _refuse(checkpoint.tensors, where)
    speculators = checkpoint.config.get("speculators_model_type") == "mtp"
    for layout in (SPECULATORS if speculators else MIMO, NEXTN):
        numbers = _numbers(checkpoint.tensors, layout)
        if not numbers:
            continue
        lowest = 0 if layout is not NEXTN else numbers[0]
        if numbers != list(range(lowest, lowest + len(numbers))):
            raise ConfigError(
                f"{where} holds the multi-token-prediction layers {numbers}, not those in between; "
                "fetch it again"
            )
        names = [_names(checkpoint.tensors, layout, number, where) for number in numbers]
        return Modules(layout=layout, names=tuple(names))
    return None


def recognize(checkpoint: CheckpointInfo) -> Match | None:
    """A checkpoint of such layers alone; a whole model that has them is a target."""
    if {"embed_tokens.weight", "norm.weight"} & {n.removeprefix("model.") for n in checkpoint.tensors}:
        return None
    if checkpoint.config.get("speculators_model_type") == "mtp":
        return Match("its config says speculators_model_type 'mtp'")
    for layout in (MIMO, NEXTN):
        if _numbers(checkpoint.tensors, layout):
            return Match(f"its tensors are named as multi-token-prediction layers of {layout.name}")
    return None


def _refuse(stored: Iterable[str], where: str) -> None:
    for name in sorted(stored):
        for pattern, what in _REFUSED:
            if re.match(pattern, name.removeprefix("model.")):
                raise Unsupported(
                    f"{where} holds the tensor {name}: multi-token-prediction layers of {what}; not supported"
                )


def _numbers(stored: Iterable[str], layout: Layout) -> list[int]:
    """Of the modules: where any of their own parts is stored."""
    found = set()
    for name in stored:
        match = layout.prefix.match(name)
        if match and name[match.end() :] in layout.parts:
            found.add(int(match[1]))
    return sorted(found)


def _names(stored: Iterable[str], layout: Layout, number: int, where: str) -> dict[str, str]:
    names: dict[str, str] = {}
    for name in sorted(stored):
        match = layout.prefix.match(name)
        if match is None or int(match[1]) != number:
            continue
        rest = name[match.end() :]
        if rest in layout.copies or rest.endswith("rotary_emb.inv_freq"):
            continue
        for pattern, what in _REFUSED_BLOCKS:
            if re.search(pattern, rest):
                raise Unsupported(f"{where} has {what}, which is not supported: it holds the tensor {name}")
        if other := names.get(layout.canonical(rest)):
            raise ConfigError(f"{where} holds {other} and {name}, which mean the same; keep one")
        names[layout.canonical(rest)] = name
    return names
