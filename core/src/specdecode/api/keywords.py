"""vLLM's engine keywords: what works here, what has no meaning, what is refused and why.

One table, published as ``docs/keywords.md``: fields of :class:`EngineArgs`, other spellings of
``speculative_config`` (:mod:`.legacy`), and ``keywords.toml``.
"""

from __future__ import annotations

import functools
import logging
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import attrs

logger = logging.getLogger(__name__)


@attrs.frozen(kw_only=True)
class Foreign:
    """A keyword that EngineArgs has no field for.

    ``off``: values that ask for nothing and are accepted; None is one of them for every keyword.
    ``secret``: its value is never printed.
    """

    name: str
    why: str
    refused: bool
    off: tuple[Any, ...] = ()
    secret: bool = False


@functools.cache
def foreign_keywords() -> Mapping[str, Foreign]:
    """Name -> keyword, from ``keywords.toml``."""
    table = tomllib.loads(files(__package__).joinpath("keywords.toml").read_text(encoding="utf-8"))
    ignored = [
        Foreign(name=name, why=group["why"], refused=False)
        for group in table["ignored"]
        for name in group["names"]
    ]
    refused = [
        Foreign(name=name, why=group["why"], refused=True, off=tuple(off), secret=group.get("secret", False))
        for group in table["refused"]
        for name, off in group["keywords"].items()
    ]
    return {keyword.name: keyword for keyword in (*ignored, *refused)}


_warned: set[str] = set()


def drop_foreign(keywords: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """``keywords`` without those that EngineArgs has no field for, and the faults of these.

    A keyword without meaning is warned about once in the life of the process; one that asks for what
    is not to be had is a fault, which says why.
    """
    table = foreign_keywords()
    kept: dict[str, Any] = {}
    faults: list[str] = []
    for name, value in keywords.items():
        keyword = table.get(name)
        if keyword is None:
            kept[name] = value
        elif value is None:
            continue
        elif not keyword.refused:
            _warn_once(keyword)
        elif value not in keyword.off:
            shown = name if keyword.secret else f"{name}={value!r}"
            faults.append(f"{shown} is refused: {keyword.why}")
    return kept, faults


def _warn_once(keyword: Foreign) -> None:
    if keyword.name not in _warned:
        _warned.add(keyword.name)
        logger.warning("%s has no effect here: %s", keyword.name, keyword.why)
