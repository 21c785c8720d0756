"""Trained heads and draft models that installed distributions carry, with how each is run.

A distribution names a function in the entry-point group ``specdecode.heads``. It takes the target's
fingerprint (:func:`specdecode.models.fingerprint`) and gives a ready ``speculative_config`` for each
checkpoint that was trained for that target; its own keys say which method reads it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import importlib_metadata

from specdecode.contract.errors import FAULTS

from .errors import PluginError

_log = logging.getLogger(__name__)

HEADS_GROUP = "specdecode.heads"


def published_heads(fingerprint: str) -> list[dict[str, Any]]:
    """Every ``speculative_config`` that is offered for a target, by distribution.

    A distribution that fails is logged and passed over.
    """
    found: list[dict[str, Any]] = []
    points = importlib_metadata.entry_points(group=HEADS_GROUP)
    for point in sorted(points, key=lambda point: (point.name, point.value)):
        try:
            given = point.load()(fingerprint)
            offered = list(given) if isinstance(given, Iterable) else [given]
            if not all(isinstance(config, Mapping) for config in offered):
                raise PluginError(f"must give a list of speculative_config mappings, got {given!r}")
            found += [dict(config) for config in offered]
        except FAULTS as error:
            _log.error("heads of %s (%s): %s: %s", point.name, point.value, type(error).__name__, error)
    return found
