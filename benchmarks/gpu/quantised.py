"""The 8B shape with weights that stay quantised: a token's time beside the floor that their bytes set.

    python benchmarks/gpu/quantised.py --json quantised.json
    python benchmarks/gpu/quantised.py --formats bf16,int4 --batches 1 --budget 60

Weights are random, requests greedy with stop conditions off, as in ``run.py``. A floor is the bytes that a
step reads (weights in the form in which they are computed with, output layer, KV) at the card's copy rate.
Each format is an engine of its own; its table is printed and written as soon as it is there.

    bf16        as they are
    fp8         float8_e4m3fn, a scale for each output (compressed-tensors)
    fp8-block   the same, a scale for each 128 x 128 weights (DeepSeek, Qwen)
    int8        a scale for each output
    int4        groups of 128 inputs (AWQ, GPTQ, compressed-tensors)
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import hardware
import torch
from decoding import COLUMNS, Size, rows
from engines import SHAPE, Engines, without_advice
from precompile import compile_one
from sections import HARDWARE
from specdecode.bench.report import environment_of
from tables import Column, table
from tune import Shape, in_processes

#: Seconds that an engine and its measurements take at the least.
_LEAST = 22


def _compressed(num_bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": num_bits, "type": kind, "strategy": strategy, "symmetric": True, **more}
    form = "pack-quantized" if num_bits == 4 else "int-quantized" if kind == "int" else "float-quantized"
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


#: Format -> its label among the kernels' weights, and the config's ``quantization_config``.
FORMATS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "bf16": ("", None),
    "fp8": ("fp8", _compressed(8, "float", "channel")),
    "fp8-block": ("fp8-128", {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "int8": ("int8", _compressed(8, "int", "channel")),
    "int4": ("int4-128", _compressed(4, "int", "group", group_size=128)),
}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", default="fp8,int4,bf16", help="some of the above, in order")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--context", type=int, default=512, help="prompt tokens")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--budget", type=float, default=120, help="seconds; formats that would not fit are left out"
    )
    parser.add_argument("--json", type=Path, help="write what is measured here, format by format")
    parser.add_argument("--shape", type=Path, default=SHAPE, help="folder with a config.json")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--device", default="cuda")
    return parser.parse_args()


def _precompile(shape: Path, formats: list[str], batches: list[int]) -> None:
    """Compile the products of all formats in many processes, before CUDA starts, and not one by one."""
    own = Shape.read(shape / "config.json")
    tasks = [
        (replace(own, label=FORMATS[name][0]), torch.bfloat16, tokens, 1, 1024)
        for name in formats
        for tokens in dict.fromkeys((*batches, 512, 8192))
    ]
    in_processes(compile_one, tasks, "sizes")


def main() -> None:
    options = _arguments()
    began = time.perf_counter()
    formats = options.formats.split(",")
    batches = [int(part) for part in options.batches.split(",")]
    if options.device == "cuda":
        _precompile(options.shape, formats, batches)
    device = torch.device(options.device)
    report: dict[str, Any] = {"environment": environment_of(options.device, {}), "rows": []}
    report["hardware"] = limits = hardware.measure(
        device, torch.bfloat16 if device.type == "cuda" else torch.float32
    )
    print(table(report["environment"]["device_name"], HARDWARE, limits), flush=True)
    rate = next(row["value"] * 1e12 for row in limits if row["what"] == "copy")
    columns = (Column("gib", "weights, GiB", ".2f"), *COLUMNS)
    failed = []
    with without_advice(), tempfile.TemporaryDirectory() as folder:
        for name in formats:
            if options.budget - (time.perf_counter() - began) < _LEAST:
                print(f"{name}: left out, the budget is spent", flush=True)
                continue
            try:
                measured = _measure(name, options, batches, rate, Path(folder))
            except Exception as error:  # the other formats still count
                failed.append(name)
                print(f"{name}: failed, {type(error).__name__}: {str(error)[:600]}", flush=True)
                continue
            report["rows"] += measured
            print(table(f"{name} weights", columns, measured), flush=True)
            if options.json:
                options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{time.perf_counter() - began:.0f} s in all", flush=True)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def _measure(
    name: str, options: argparse.Namespace, batches: list[int], rate: float, folder: Path
) -> list[dict[str, Any]]:
    model = folder / name
    model.mkdir()
    config = json.loads((options.shape / "config.json").read_text())
    if FORMATS[name][1] is not None:
        config["quantization_config"] = FORMATS[name][1]
    (model / "config.json").write_text(json.dumps(config))
    engines = Engines(
        model=str(model),
        keywords={
            "dtype": "bfloat16" if options.device == "cuda" else "float32",
            "device": options.device,
            "max_model_len": max(1024, options.context + options.new_tokens + 64),
            "max_num_batched_tokens": 8192,
            "gpu_memory_utilization": 0.85,
            **({} if options.kv_cache_dtype == "auto" else {"kv_cache_dtype": options.kv_cache_dtype}),
        },
    )
    try:
        llm = engines.get(name, max_num_seqs=max(batches))
        size = Size(
            batches=tuple(batches),
            context=options.context,
            new_tokens=options.new_tokens,
            repeats=options.repeats,
        )
        found = rows(llm, name, size, bytes_per_s=rate)
        for row in found:
            row["gib"] = llm.llm_engine.memory.weight_bytes / 2**30
            row["start_seconds"] = engines.start_seconds[name]
        return found
    finally:
        engines.close()


if __name__ == "__main__":
    main()
