"""specdec on many GPUs and machines, through Ray: replicas behind one door, and batch jobs.

``build`` makes a Ray Serve application, ``generate`` answers a Ray Data dataset, ``place_workers`` starts
the ranks of one sharded model. ``docs/fleet.md`` is the manual. Importing this costs nothing: Ray and
torch come with the names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .app import build
    from .batch import generate
    from .workers import place_workers

__all__ = ["build", "generate", "place_workers"]

_HOMES = {"build": ".app", "generate": ".batch", "place_workers": ".workers"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name], __name__), name)
