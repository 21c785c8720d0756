"""Compile the kernels of a model's forward in many processes, into Triton's cache, before anything runs.

    python benchmarks/gpu/precompile.py --rows 1,8,32 --per-row 1,6 --max-slots 1024

A first run otherwise compiles them one by one. Prompts of any length and the output projection are
included; kernels of sampling and verification are few, and are left to the first run.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from specdec_kernels.projection import tiles
from tune import HERE, Layers, Shape, in_processes, without_a_card


def compile_one(task: tuple[Shape, torch.dtype, int, int, int]) -> str:
    """In a process of its own: what went wrong, or nothing."""
    from specdec_kernels.gpu.compiling import compiling_only

    shape, dtype, rows, per_row, max_slots = task
    without_a_card()
    try:
        with compiling_only(inspect=False):
            layers = Layers(shape, dtype, "meta", 1)
            layers.run(layers.inputs(rows * per_row, per_row, max_slots))
    except Exception as error:
        return f"{rows} x {per_row}: {error!r}"[:300]
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--config", type=Path, default=HERE / "llama-8b-shape/config.json")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--rows", default="1,2,4,8,16,24,32,48,64,96,128", help="of a batch")
    parser.add_argument("--per-row", default="1", help="tokens of a row")
    parser.add_argument("--max-slots", type=int, default=1024, help="the longest row")
    arguments = parser.parse_args()
    shape, dtype = Shape.read(arguments.config), getattr(torch, arguments.dtype)
    rows, per_row = ([int(part) for part in text.split(",")] for text in (arguments.rows, arguments.per_row))
    cases = [(count, tokens) for tokens in per_row for count in rows]
    cases += [(bound, 1) for bound in tiles.CLASSES[:-1]] + [(tiles.CLASSES[-2] + 1, 1)]
    in_processes(compile_one, [(shape, dtype, *case, arguments.max_slots) for case in cases], "cases")


if __name__ == "__main__":
    main()
