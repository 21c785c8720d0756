"""Draft heads for SmolLM2-135M-Instruct: where each lies, and how it is run.

::

    LLM(model, speculative_config={"method": "eagle3", "model": str(path("eagle3")), ...})

There is a folder for each head, in the layout that ``specdecode train`` publishes: ``config.json``,
``model.safetensors``, ``training.json`` and ``README.md``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["heads", "names", "path"]

_FOLDER = Path(__file__).parent


def names() -> tuple[str, ...]:
    """The heads there are."""
    return tuple(sorted(file.parent.name for file in _FOLDER.glob("*/training.json")))


def path(name: str) -> Path:
    """The directory of a head.

    Raises:
        KeyError: there is none of that name; says which there are.
    """
    if name not in names():
        raise KeyError(f"no head is named {name!r}; there are {', '.join(names()) or 'none'}")
    return _FOLDER / name


def heads(fingerprint: str) -> list[dict[str, Any]]:
    """A ready ``speculative_config`` of each head for one target: the entry point ``specdecode.heads``.

    Heads that are here as references of their formats, and gain nothing, are left out.

    Args:
        fingerprint: of the target, by ``specdecode.models.fingerprint``.
    """
    found = []
    for name in names():
        trained = json.loads((_FOLDER / name / "training.json").read_text("utf-8"))
        if trained.get("target_fingerprint") == fingerprint and not trained.get("reference"):
            found.append({**trained["speculative_config"], "model": str(_FOLDER / name)})
    return found
