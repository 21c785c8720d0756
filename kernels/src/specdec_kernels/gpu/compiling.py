"""Compiling kernels for a card that need not be there: for the tests, and ahead of measurements.

Compiled kernels land in Triton's cache on disk, where a later launch finds them.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from . import launching
from .sass import main_loop, overwritten

_TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@dataclass(frozen=True)
class Compiled:
    """A kernel as it was compiled.

    Attributes:
        registers: of a thread.
        stack: bytes of a thread; what does not fit into registers is spilled here.
        shared: bytes of a program's shared memory.
        overwritten: instructions that write what a product in flight may still read.
        loop: instructions by class in a turn of the main loop (:func:`~.sass.main_loop`).
    """

    name: str
    registers: int
    stack: int
    shared: int
    overwritten: int = 0
    loop: dict[str, int] = field(default_factory=dict)


class _NoCard:
    """A driver that knows what it would launch on, and nothing else."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling_only(capability: int = 90, *, inspect: bool = True) -> Iterator[list[Compiled]]:
    """Inside, launches compile their kernels and run nothing: tensors may be on the meta device.

    Args:
        capability: of the card to compile for, 90 for Hopper.
        inspect: ask for what the machine code tells, which takes processes; else it is 0.

    Yields:
        What was compiled, a kernel once; filled as it goes.
    """
    compiled: list[Compiled] = []
    seen: set[str] = set()
    run, dependent = JITFunction.run, launching.dependent_launch
    active = driver._active  # its `reset_active` looks for a card

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            registers, stack, written, loop = _usage(kernel.asm["cubin"]) if inspect else (0, 0, 0, {})
            compiled.append(Compiled(self.__name__, registers, stack, kernel.metadata.shared, written, loop))
        return kernel

    driver.set_active(_NoCard(capability))  # type: ignore[arg-type]  # all that compiling asks for
    JITFunction.run = compile_only
    launching.dependent_launch = lambda: capability >= 90  # type: ignore[assignment]
    keeping, launching.keeping = launching.keeping, False  # what runs nothing is not to be kept
    try:
        yield compiled
    finally:
        launching.keeping = keeping
        launching.dependent_launch = dependent
        JITFunction.run = run
        driver._active = active


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def _usage(cubin: bytes) -> tuple[int, int, int, dict[str, int]]:
    """Registers, stack, what is overwritten, and the main loop."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text, code = (
            subprocess.run([_TOOL, what, file.name], check=True, capture_output=True, text=True).stdout
            for what in ("-res-usage", "-sass")
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2]), len(overwritten(code)), main_loop(code)
