"""How much a proposer holds on to: the objects reachable from it, without code and modules."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

# Code is no state, and leads to the rest of the process.
_CODE = (type, types.ModuleType, types.BuiltinFunctionType, types.CodeType, types.FrameType)


def reachable(root: Any) -> Iterator[Any]:
    """Every object that ``root`` keeps alive, itself included, each once."""
    seen: set[int] = set()
    stack = [root]
    while stack:
        found = stack.pop()
        if id(found) in seen or isinstance(found, _CODE):
            continue
        seen.add(id(found))
        yield found
        stack.extend(_referents(found))


def _referents(found: Any) -> list[Any]:
    if isinstance(found, types.FunctionType):  # not its globals
        return [found.__closure__, found.__defaults__, found.__kwdefaults__, found.__dict__]
    if isinstance(found, np.ndarray):  # a view keeps its array, and does not tell the collector
        return [found.base]
    if isinstance(found, dict):  # nor does a dict tell its keys, if all are strings
        return [*gc.get_referents(found), *found]
    return gc.get_referents(found)


def size_bytes(root: Any) -> int:
    """Bytes that ``root`` keeps alive, tensors and arrays included."""
    return sum(_size(found) for found in reachable(root))


def _size(found: Any) -> int:
    size = sys.getsizeof(found, 0)
    return size + found.numel() * found.element_size() if isinstance(found, torch.Tensor) else size


def strings(root: Any) -> set[str]:
    """Every string that ``root`` keeps alive."""
    return {found for found in reachable(root) if isinstance(found, str)}
