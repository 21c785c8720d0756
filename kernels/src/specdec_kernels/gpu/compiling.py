"""Compiling kernels for a card that need not be there: for the tests, and ahead of measurements.

Compiled kernels land in Triton's cache on disk, where a later launch finds them.
"""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
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

_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


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
        What was compiled, a kernel once; filled at the end.
    """
    compiled: list[Compiled] = []
    kernels: dict[str, tuple[str, Any]] = {}
    run, dependent = JITFunction.run, launching.dependent_launch
    active = driver._active  # its `reset_active` looks for a card

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        kernels.setdefault(kernel.hash, (self.__name__, kernel))
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
    cubins = [kernel.asm["cubin"] for _, kernel in kernels.values()]
    listings = _listings(cubins, capability) if inspect and cubins else [""] * len(cubins)
    for (name, kernel), cubin, code in zip(kernels.values(), cubins, listings, strict=True):
        registers, stack = _usage(cubin) if inspect else (0, 0)
        shared, written = kernel.metadata.shared, len(overwritten(code))
        compiled.append(Compiled(name, registers, stack, shared, written, main_loop(code)))


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers and stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = _told("cuobjdump", "-res-usage", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])


def _listings(cubins: Sequence[bytes], capability: int) -> list[str]:
    """The disassembly of each; of all of them in one process, for to start it takes longer than a kernel."""
    codes = [_code(cubin) for cubin in cubins]
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(b"".join(codes))
        file.flush()
        text = _told("nvdisasm", "-ndf", "--binary", f"SM{capability}", file.name)
    lines = iter([(int(at[1], 16), at[0]) for at in re.finditer(r"^\s*/\*([0-9a-f]{4,})\*/.*$", text, re.M)])
    listings, end, line = [], 0, next(lines, None)
    for code in codes:
        end, own = end + len(code), []
        while line is not None and line[0] < end:
            own.append(line[1])
            line = next(lines, None)
        listings.append("\n".join(own))
    return listings


def _code(cubin: bytes) -> bytes:
    """What a cubin, which is an ELF file, has in its sections of instructions."""
    (headers,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, of_names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, headers + size * index) for index in range(count)]
    names = sections[of_names][4]
    return b"".join(
        cubin[offset : offset + length]
        for name, _, _, _, offset, length in sections
        if cubin.startswith(b".text.", names + name)
    )


def _told(tool: str, *arguments: str) -> str:
    """What a tool beside Triton's compiler prints."""
    return subprocess.run([_TOOLS / tool, *arguments], check=True, capture_output=True, text=True).stdout
