"""Whether Triton kernels can be had, and how they are launched."""

from __future__ import annotations

import functools
import importlib.util
import os
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


def launch(
    kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int, num_stages: int = 1, **constants: Any
) -> None:
    """Launch a kernel whose last constant is ``PDL``: whether it is launched dependently."""
    pdl = dependent_launch()
    options: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    kernel[grid](*args, **constants, PDL=pdl, num_warps=num_warps, num_stages=num_stages, **options)
