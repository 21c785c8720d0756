"""Plugins: found through package metadata, loaded under guard, asked by name or by checkpoint.

A plugin imports :data:`hookimpl` from here and nothing else; the rest is core's side and is imported on use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .markers import hookimpl

if TYPE_CHECKING:
    from .checkpoint import read_checkpoint
    from .errors import PluginError
    from .heads import published_heads
    from .manager import PluginManager, default_manager
    from .preparation import Prepared, prepare
    from .records import MethodRecord, PluginRecord, Provided, Status

_HOMES = {
    "MethodRecord": "records",
    "PluginError": "errors",
    "PluginManager": "manager",
    "PluginRecord": "records",
    "Prepared": "preparation",
    "Provided": "records",
    "Status": "records",
    "default_manager": "manager",
    "prepare": "preparation",
    "published_heads": "heads",
    "read_checkpoint": "checkpoint",
}

__all__ = [
    "MethodRecord",
    "PluginError",
    "PluginManager",
    "PluginRecord",
    "Prepared",
    "Provided",
    "Status",
    "default_manager",
    "hookimpl",
    "prepare",
    "published_heads",
    "read_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
