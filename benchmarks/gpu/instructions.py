"""What the products' main loops cost, by Hopper's machine code: no card is needed.

    python benchmarks/gpu/instructions.py --weights fp8,int4-128 --tokens 16,32      the tiles in use
    python benchmarks/gpu/instructions.py --weights fp8 --tokens 16 --candidates     those that tune.py tries
    python benchmarks/gpu/instructions.py --only down --tile 32,16,0,256,3,4,512,0,0,1

A line for each tile: its values as ``tuned.json`` has them, the instructions of a lane for each weight, in
all and by what they keep busy, and the programs that an SM holds at a time. 132 SMs at 1.75 GHz issue 30e12
of them in a second: at 4.2 TB/s a weight of a byte comes in the time of 7, of half a byte in that of 3.5.
Those of integers (shifts, logic, most others) take two turns each.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import tune
from specdec_kernels.gpu.compiling import Compiled, compiling_only
from specdec_kernels.projection import tiles
from specdec_kernels.projection.tiles import Tile

#: Products in the order in which a layer computes them, and their kernels.
_KERNELS = {"qkv": "qkv_kernel", "o": "add_kernel", "gate_up": "gate_up_kernel", "down": "add_kernel"}
CLASSES = ("logic", "shift", "float", "convert", "tensor", "shared", "load", "wait", "uniform", "other")
#: Registers and shared memory of an SM; what each program takes of the latter for itself.
_REGISTERS, _MEMORY, _OWN = 65536, 233472, 1024


@dataclass(frozen=True)
class Case:
    shape: tune.Shape
    bound: int
    tiles: dict[str, Tile]
    names: tuple[str, ...]  #: of the products that are looked at


def compiled(case: Case) -> list[tuple[Case, str, Compiled]]:
    """A layer's products, compiled for their tiles; in a process of its own."""
    tune.without_a_card()
    tune.use(case.shape, case.tiles)
    with compiling_only() as kernels:
        layers = tune.Layers(case.shape, torch.bfloat16, "meta", 1)
        layers.run(layers.inputs(case.bound))
    left = list(kernels)
    found = []
    for name, kernel in _KERNELS.items():
        index = next(index for index, other in enumerate(left) if other.name == kernel)
        found.append((case, name, left.pop(index)))
    return [entry for entry in found if entry[1] in case.names]


def line(case: Case, name: str, kernel: Compiled) -> str:
    tile = case.tiles[name]
    parts = case.shape.parts(name)
    tall = tile.rows * (parts if tiles.beside(tile, parts) else 1)
    threads = 32 * tile.warps
    programs = min(
        _MEMORY // (kernel.shared + _OWN), _REGISTERS // (-(-kernel.registers // 8) * 8 * threads), 32
    )
    each = threads / (tall * tile.inputs)
    by_class = " ".join(f"{name} {kernel.loop.get(name, 0) * each:.2f}" for name in CLASSES)
    return (
        f"{case.shape.label or 'bf16':9s}{case.bound:4d} {name:8s}{tile.values!s:42s}"
        f"{sum(kernel.loop.values()) * each:5.2f} a weight: {by_class}; {kernel.registers} registers, "
        f"{kernel.stack} stack, {kernel.shared // 1024} KiB, {programs} programs an SM"
        + (f", {kernel.overwritten} OVERWRITTEN" if kernel.overwritten else "")
    )


def cases(options: argparse.Namespace) -> Iterator[Case]:
    read = tune.Shape.read(options.config)
    names = tuple(options.only.split(",")) if options.only else tuple(_KERNELS)
    how = tune.How(options.quick, refine=True, only=frozenset(names), logits=False)
    for label in options.weights.split(","):
        shape = replace(read, label=label)
        for bound in map(int, options.tokens.split(",")):
            used = tune.start(shape, torch.bfloat16, bound, how)
            if options.tile:
                wanted = Tile.parse([int(value) for value in options.tile.split(",")])
                own = {name: tune.cut(shape, name, wanted, torch.bfloat16) for name in names}
                yield Case(shape, bound, used | own, names)
                continue
            yield Case(shape, bound, used, names)
            tried = tune.plan(shape, torch.bfloat16, bound, replace(how, refine=False))
            for index in range(max(map(len, tried.values())) if options.candidates else 0):
                some = {name: found[index] for name, found in tried.items() if index < len(found)}
                yield Case(shape, bound, used | some, tuple(some))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=tune.HERE / "llama-8b-shape/config.json")
    parser.add_argument("--weights", default="fp8,int4-128,int8", help="as of tune.py; '': bfloat16")
    parser.add_argument("--tokens", default="16,32", help="classes")
    parser.add_argument("--only", help=f"some of {', '.join(_KERNELS)}")
    parser.add_argument("--tile", help="values of one tile, in place of those in use")
    parser.add_argument("--candidates", action="store_true", help="also those that tune.py tries")
    parser.add_argument("--quick", action="store_true", help="fewer candidates")
    options = parser.parse_args()
    tune.without_a_card()
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        for found in pool.imap(compiled, list(cases(options)), 1):
            for case, name, kernel in found:
                print(line(case, name, kernel), flush=True)


if __name__ == "__main__":
    main()
