"""How attention is divided, in whole layers of the 8B shape: other ways than that of ``attention/gpu.py``.

    python benchmarks/gpu/divisions.py --budget 120 --json divisions.json

For each batch and context: the layers in a CUDA graph (as in ``tune.py``) with every number of programs an
SM and of tiles of keys that each keeps on their way. A kernel alone would hide what it takes from its
neighbours. Printed is what a layer takes less by each than by the first; every output must equal the first's
to the bit.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
import tune
from attention import setting
from precompile import compile_one

#: Context, rows, tokens of a row.
CASES = [(512, rows, per_row) for rows in (1, 8, 32) for per_row in (1, 4, 6)]
CASES += [(4096, 1, 1), (4096, 1, 4), (4096, 8, 1), (4096, 8, 4), (4096, 32, 1)]
#: Programs an SM, tiles in flight: those in use first.
DIVISIONS = [(2, 2), *(way for way in itertools.product((2, 3, 4, 6, 8, 16), (2, 1, 0)) if way != (2, 2))]
_TURNS = 3


def dividing(division: tuple[int, int]) -> contextlib.AbstractContextManager[None]:
    programs, tiles = division
    return setting(PROGRAMS_PER_SM=programs, TILES_IN_FLIGHT=tiles)


def compile_divided(task: tuple[tune.Shape, tuple[int, int, int], tuple[int, int]]) -> str:
    """In a process of its own: what went wrong, or nothing."""
    shape, (tune.CONTEXT, rows, per_row), division = task
    with dividing(division):
        error = compile_one((shape, torch.bfloat16, rows, per_row, 2 * tune.CONTEXT))
    return f"{division}: {error}" if error else ""


def measured(layers: tune.Layers, case: tuple[int, int, int], left: Callable[[], float]) -> dict[str, float]:
    """Milliseconds by division, the least of some turns; those whose output differs are left out."""
    context, rows, per_row = case
    timer = tune.Timer(layers, 1, replays=15)
    found: dict[str, float] = {}
    inputs = layers.inputs(rows * per_row, per_row, 2 * context)
    first = None
    for turn, division in itertools.product(range(_TURNS), DIVISIONS):
        if turn and left() < 0:
            break
        with dividing(division):
            inputs.meta.plans.clear()
            output = layers.run(inputs)
            first = output.clone() if first is None else first
            name = f"{division[0]} x {division[1]}"
            if not torch.equal(output, first):
                print(f"OTHER BITS by {name}", flush=True)
                continue
            taken = timer.measure(functools.partial(layers.run, inputs))
            found[name] = min(taken, found.get(name, taken))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=tune.HERE / "llama-8b-shape/config.json")
    parser.add_argument("--budget", type=float, default=120, help="seconds")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    began = time.perf_counter()
    shape = tune.Shape.read(options.config)
    tune.in_processes(compile_divided, list(itertools.product([shape], CASES, DIVISIONS)), "ways")
    found = {}
    for index, case in enumerate(CASES):
        share = (began + options.budget - time.perf_counter()) / (len(CASES) - index)
        stop = time.perf_counter() + share
        if not index or case[0] != CASES[index - 1][0]:
            tune.CONTEXT = case[0]  # what tables and rows are made for
            layers = tune.Layers(shape, torch.bfloat16, "cuda", 6)
        times = measured(layers, case, lambda: stop - time.perf_counter())  # noqa: B023  called at once
        found[" ".join(map(str, case))] = times
        base, count = next(iter(times.values())), len(layers.weights)
        less = ", ".join(f"{name} {(base - taken) / count * 1e3:.1f}" for name, taken in times.items())
        print(
            f"context {case[0]}, {case[1]} x {case[2]}: {base:.3f} ms; a layer less, us: {less}", flush=True
        )
        if options.json:
            options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
