"""Whether Triton kernels can be had, and how they are launched."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import torch

#: What the Triton kernels compute in. float16 goes through the torch references.
DTYPES = (torch.float32, torch.bfloat16)
#: What a KV cache may be stored in beside them.
_CACHED = torch.float8_e4m3fn
#: Programmatic dependent launch came with Hopper.
_DEPENDENT_LAUNCH = (9, 0)


@functools.cache
def interpreted() -> bool:
    """Whether Triton's interpreter runs kernels on CPU tensors; it was asked for before Triton's import."""
    return os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None


@functools.cache
def _compiled() -> bool:
    return torch.cuda.is_available() and importlib.util.find_spec("triton") is not None


def takes(*tensors: torch.Tensor) -> bool:
    """Whether the kernels can work on ``tensors``: of a GPU, in float32 or bfloat16.

    Under the interpreter, CPU tensors in float32 (its bfloat16 is wrong). float8 goes with either: a KV cache
    may be stored in it.
    """
    if interpreted():
        return all(tensor.dtype in (torch.float32, _CACHED) and not tensor.is_cuda for tensor in tensors)
    return _compiled() and all(tensor.is_cuda and tensor.dtype in (*DTYPES, _CACHED) for tensor in tensors)


@functools.cache
def dependent_launch() -> bool:
    """Whether kernels start while the one before them ends, and wait inside (programmatic dependent launch).

    Every kernel that is launched so must call ``gdc_wait`` before it touches what another one wrote.
    """
    return _compiled() and not interpreted() and torch.cuda.get_device_capability() >= _DEPENDENT_LAUNCH


#: Compiled kernels and their last arguments by what they were launched with; see :func:`specialization`.
_kept: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
#: Whether launches remember what was compiled for them.
keeping = True


def launch(
    kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int, num_stages: int = 1, **constants: Any
) -> None:
    """Launch a kernel whose last constant is ``PDL``: whether it is launched dependently.

    Triton's own launch finds the compiled kernel anew each time, by all arguments and their names, which
    takes most of its time; where none of them is new to it, this does not ask.
    """
    pdl = dependent_launch()
    key: tuple[Any, ...] | None = None
    if keeping and not interpreted() and (told := specialization(args)) is not None:
        device = torch.cuda.current_device()
        key = (kernel, device, pdl, num_warps, num_stages, *constants.values(), *told)
        if (kept := _kept.get(key)) is not None:
            compiled, rest = kept
            compiled[(*grid, 1, 1)[:3]](*args, *rest)
            return
    options: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    given = constants | {"PDL": pdl}
    compiled = kernel[grid](*args, **given, num_warps=num_warps, num_stages=num_stages, **options)
    if key is not None:
        _kept[key] = compiled, tuple(given[name] for name in kernel.arg_names[len(args) :])


def specialization(args: Sequence[Any]) -> list[Any] | None:
    """What Triton compiles a kernel for, of its arguments: equal where that is; None if it cannot be told."""
    told: list[Any] = []
    for value in args:
        kind = type(value)
        if value is None or kind is float:
            told.append(kind)
        elif kind is int:
            told.append((value == 1, value % 16 == 0, -(1 << 31) <= value < 1 << 31, value < 1 << 63))
        elif isinstance(value, torch.Tensor):
            told.append((value.dtype, value.data_ptr() % 16 == 0))
        else:
            return None
    return told
