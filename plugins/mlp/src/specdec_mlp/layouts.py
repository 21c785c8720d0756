"""One name for each tensor, and the layouts that are refused by theirs.

Canonical names, ``k`` a step: ``emb.k.weight``, ``proj.k.weight``, ``head.k.weight``, ``ln.k.weight``,
``ln.k.bias``. With tied weights all steps use those of step 0, but for ``proj``: step 0 has its own, and all
others use ``proj.1``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from specdecode.contract import ConfigError, Unsupported

PREFIX = "speculator."
_NAME = re.compile(r"(emb|proj|head|ln)\.(\d+)\.(weight|bias)")
_REFUSED = (
    (
        r"(forget|input|cell|output)_emb|cell_ln|state_ln|projs\.",
        "an LSTM in place of the MLP (Arctic, sum_lstm)",
    ),
    (r"(qhead|qweight|qzeros|weight_scale|weight_packed|scale_inv)", "quantized weights"),
)


def canonical(name: str) -> str | None:
    """The one name of a stored tensor; None if it is none of an MLP speculator's."""
    bare = name.removeprefix("model.").removeprefix(PREFIX)
    return bare if _NAME.fullmatch(bare) else None


def source(name: str, *, tied: bool) -> str:
    """The canonical name under which the weight of a step is stored."""
    kind, step, part = name.split(".")
    first = min(int(step), 1) if kind == "proj" else 0
    return f"{kind}.{first}.{part}" if tied else name


def canonical_names(stored: Iterable[str], where: str) -> dict[str, str]:
    """Canonical name -> stored name.

    Raises:
        Unsupported: a tensor belongs to a variant that is not built; names it.
        ConfigError: a tensor means nothing here, or two have one meaning.
    """
    names: dict[str, str] = {}
    unknown: list[str] = []
    for name in sorted(stored):
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
            f"{where} holds {unknown[0]}{' and others' if unknown[1:] else ''}, not of an MLP speculator"
        )
    return names
