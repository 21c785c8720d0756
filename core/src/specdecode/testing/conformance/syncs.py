"""Finds what would make the host wait for a device, on a CPU too: calls that hand values over, either way."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

#: Functions that read a tensor's values into Python, or whose result's shape depends on them.
_WAITING: dict[Any, str] = {
    torch.Tensor.item: "Tensor.item",
    torch.Tensor.tolist: "Tensor.tolist",
    torch.Tensor.numpy: "Tensor.numpy",
    torch.Tensor.cpu: "Tensor.cpu",
    torch.Tensor.__array__: "numpy.asarray of a tensor",
    torch.Tensor.__bool__: "bool of a tensor",
    torch.Tensor.__int__: "int of a tensor",
    torch.Tensor.__float__: "float of a tensor",
    torch.Tensor.__index__: "a tensor as an index",
    torch.Tensor.nonzero: "Tensor.nonzero",
    torch.nonzero: "torch.nonzero",
    torch.Tensor.masked_select: "Tensor.masked_select",
    torch.masked_select: "torch.masked_select",
    torch.Tensor.unique: "Tensor.unique",
    torch.unique: "torch.unique",
    torch.equal: "torch.equal",
    torch.allclose: "torch.allclose",
}

#: Functions that make a tensor of values in Python.
_COPYING = (torch.tensor, torch.as_tensor, torch.asarray)

#: Code whose waits are not the proposer's, but for the scripted proposers.
_CORE = ("specdecode.", "specdec_kernels.")
_SCRIPTED = "specdecode.testing.scripted."


class SyncWatch(TorchFunctionMode):
    """While it is entered, tells ``found`` of every wait that a proposer's own code asks for.

    ``copies``: of every copy from the host as well. It waits for nobody who has pinned memory, and a graph
    would repeat it with the values of the capture.
    """

    def __init__(self, found: Callable[[str], None], *, copies: bool = False) -> None:
        super().__init__()
        self._found = found
        self._copies = copies

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = _wait(func, args)
        if not name and self._copies:
            name = _copy(func, args)
        if name:
            self._tell(name)
        return func(*args, **(kwargs or {}))

    def _tell(self, name: str) -> None:
        """Tell of a wait, unless core's code asks for it."""
        caller: FrameType | None = sys._getframe(2)
        while caller is not None and _module(caller).startswith("torch."):
            caller = caller.f_back
        if caller is None or _is_core(_module(caller)):
            return
        self._found(f"{name} in {_module(caller)}{caller.f_code.co_name}, line {caller.f_lineno}")


def _module(frame: FrameType) -> str:
    """Its module's name, and a dot."""
    return f"{frame.f_globals.get('__name__', '')}."


def _is_core(module: str) -> bool:
    return module.startswith(_CORE) and not module.startswith(_SCRIPTED)


def _wait(func: Any, args: Sequence[Any]) -> str:
    """What makes the host wait in this call; empty: nothing."""
    if func is torch.Tensor.__getitem__ and _is_mask(args[1]):
        return "indexing with a boolean mask"
    if func is torch.where and len(args) == 1:
        return "torch.where of a condition alone"
    return _WAITING.get(func, "")


def _copy(func: Any, args: Sequence[Any]) -> str:
    """What copies from the host in this call; empty: nothing."""
    if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and _is_listed(args[1]):
        return "indexing with a list"
    if func in _COPYING and not isinstance(args[0], torch.Tensor):
        return f"torch.{func.__name__} of values in Python"
    return ""


def _is_listed(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, list | range | np.ndarray) for part in parts)


def _is_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, torch.Tensor) and part.dtype is torch.bool for part in parts)
