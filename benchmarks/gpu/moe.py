"""A mixture of experts on one GPU: plain decoding, what verification costs, and synthetic acceptance.

    python benchmarks/gpu/moe.py --budget 120 --json moe.json
    python benchmarks/gpu/moe.py --layers 12 --batches 1,8

The Qwen3-30B-A3B shape with random weights takes 61 GB in bfloat16; ``--layers`` takes fewer of its layers,
each of which takes as long. Attention and experts of random weights write more than an embedding holds, so
that all tokens of a text would choose alike; their output is scaled down, which leaves each token its own
experts, as ``specdec_kernels.experts.expected_experts`` has it.

The floor of a step is the bytes of what it must read by the card's rate of copying: attention, routers and
output layer once, the experts that its tokens chose, and KV. Experts are counted, not estimated.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import decoding
import hardware
import torch
from engines import Engines, without_advice
from precompile import compile_one
from specdec_kernels.experts import expected_experts
from specdecode import LLM
from specdecode.bench.report import environment_of
from specdecode.models import loader, weight_bytes
from specdecode.models.experts import SparseMLP
from specdecode.runner.graphs import Graphs, row_buckets
from specdecode.runner.seats import Seats, SeatShape
from specdecode.runner.steady import SteadyStep
from tables import Column, table
from timing import captured, device_ms
from tune import Shape, in_processes

SHAPE = Path(__file__).parent / "qwen3-30b-a3b-shape"
#: Tokens a row of the measured steps.
TOKENS = (1, 2, 4, 6, 8)
#: Seconds that a part takes at the least: it is left out where the budget has fewer left.
LEAST = {"plain": 30, "steps": 15, "synthetic": 30}
#: Most tokens of a step with prompts.
_PROMPTS = 4096
#: Drafts of a row and how often each is accepted behind an accepted one.
LENGTH, ACCEPTANCE = 3, 0.8
#: Factor of what attention and experts write.
_WRITTEN = 1e-2

STEPS = (
    Column("batch", "batch"),
    Column("tokens", "tokens a row"),
    Column("step_ms", "step, ms", ".3f"),
    Column("to_one", "to 1 token", ".3f"),
    Column("experts", "experts a layer", ".1f"),
    Column("expected", "by chance", ".1f"),
    Column("read_gb", "read, GB", ".2f"),
    Column("floor_ms", "floor, ms", ".3f"),
    Column("of_floor", "of floor", ".2f"),
)


def streamed_bytes(decoder: Any, touched: float, rows: int, context: int) -> float:
    """Bytes that a step reads at the least.

    Args:
        touched: experts of a layer, on the average.
        rows: of the batch, each with ``context`` tokens of KV.
    """
    config = decoder.config
    weights = float(weight_bytes(decoder))
    if not config.tie_word_embeddings:
        weights -= decoder.embed_tokens.weight.nbytes
    for layer in decoder.layers:
        if isinstance(layer.mlp, SparseMLP):
            experts = layer.mlp.gate_up_proj.num_bytes + layer.mlp.down_proj.num_bytes
            weights -= experts * (1 - touched / layer.mlp.gate_up_proj.num_experts)
    kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim * decoder.dtype.itemsize
    return weights + rows * context * kv


@contextlib.contextmanager
def spread_weights() -> Iterator[None]:
    """Dummy weights of the engines made inside, whose layers add little to a token's embedding."""
    fill = loader.randomize

    def spread(decoder: Any, **options: Any) -> None:
        fill(decoder, **options)
        for layer in getattr(decoder, "layers", ()):
            layer.self_attn.o_proj.weight.data.mul_(_WRITTEN)
            layer.mlp.down_proj.weight.data.mul_(_WRITTEN)

    with mock.patch.object(loader, "randomize", spread):
        yield


@contextlib.contextmanager
def counted_experts() -> Iterator[list[int]]:
    """How many experts each layer that is computed inside, kernel by kernel, touches."""
    from specdec_kernels.experts import reference

    counts: list[int] = []
    choose = reference.choose

    def on_a_cpu(*args: Any, **options: Any) -> Any:
        ids, weights = choose(*args, **options)
        counts.append(len(ids.unique()))
        return ids, weights

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(reference, "choose", on_a_cpu))
        if torch.cuda.is_available():
            from specdec_kernels.experts import gpu

            chosen = gpu.chosen

            def on_a_gpu(*args: Any, **options: Any) -> Any:
                weights, order, tiles = chosen(*args, **options)
                experts = tiles[:, 0]
                counts.append(len(experts[experts >= 0].unique()))
                return weights, order, tiles

            stack.enter_context(mock.patch.object(gpu, "chosen", on_a_gpu))
        yield counts


@torch.inference_mode()
def step_row(llm: LLM, rows: int, tokens: int, context: int, bytes_per_s: float) -> dict[str, Any]:
    """One size of the target's step over seats: its time, the experts it touched, its floor."""
    engine = llm.llm_engine
    runner, size = engine.core.runner, engine.args.block_size
    shape = SeatShape(
        rows=rows,
        width=tokens - 1,
        depth=tokens - 1,
        tree=False,
        columns=-(-(context + 2 * tokens) // size) + 1,
        block_size=size,
        vocab_size=engine.target.vocab_size,
        history=0,
    )
    seats = Seats(shape, runner.device)
    steady = SteadyStep(runner, seats, Graphs(runner.device, enabled=False))

    def seat() -> None:
        seats.rehearse(tokens - 1, runner.num_blocks)
        seats.committed.fill_(context)
        seats.limit.fill_(context + tokens + 1)

    def run() -> Any:
        return steady.run(rows, tokens, None)

    seat()
    with counted_experts() as counts:
        run()
    decoder, mixture = runner.model, runner.model.config.experts
    touched = sum(counts) / len(counts)
    read = streamed_bytes(decoder, touched, rows, context)
    return {
        "batch": rows,
        "tokens": tokens,
        "step_ms": device_ms(captured(run), before=seat),
        "experts": touched,
        "expected": expected_experts(mixture.num_experts, mixture.count, rows * tokens),
        "read_gb": read / 1e9,
        "floor_ms": read / bytes_per_s * 1e3,
    }


def step_rows(llm: LLM, options: argparse.Namespace, rate: float, left: Any) -> list[dict[str, Any]]:
    """A row for each batch and number of tokens a row."""
    for key, value in llm.llm_engine.core.runner.store.target:
        key.normal_()  # zeros would be kinder to the card
        value.normal_()
    found: list[dict[str, Any]] = []
    for batch in options.batches:
        for tokens in TOKENS:
            if left() < 5:
                return found
            row = step_row(llm, batch, tokens, options.context, rate)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # a graph's memory is a pool of its own
            one = next((own for own in found if own["batch"] == batch), row)
            row |= {"to_one": row["step_ms"] / one["step_ms"], "of_floor": row["step_ms"] / row["floor_ms"]}
            found.append(row)
    return found


def with_floors(
    llm: LLM, rows: Sequence[dict[str, Any]], steps: Sequence[dict[str, Any]], context: int, rate: float
) -> list[dict[str, Any]]:
    """Rows of plain decoding with the floor of their bytes; experts as counted in a step of the size."""
    mixture = llm.llm_engine.core.runner.model.config.experts
    for row in rows:
        counted = [own["experts"] for own in steps if (own["batch"], own["tokens"]) == (row["batch"], 1)]
        touched = (
            counted[0] if counted else expected_experts(mixture.num_experts, mixture.count, row["batch"])
        )
        read = streamed_bytes(llm.llm_engine.core.runner.model, touched, row["batch"], context)
        row["floor_ms"] = read / rate * 1e3
        row["of_floor"] = row["ms_per_token"] / row["floor_ms"]
    return list(rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, help="of the shape's, the first so many; default: all")
    parser.add_argument("--batches", type=_numbers, default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=512, help="prompt tokens")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--budget", type=float, default=120, help="seconds; what would not fit is left out")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--shape", type=Path, default=SHAPE, help="folder with a config.json")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def compile_ahead(options: argparse.Namespace) -> None:
    """Compile the forward's kernels in many processes, before CUDA starts; a run would do it one by one."""
    config = json.loads((options.shape / "config.json").read_text())
    shape = replace(Shape.read(options.shape / "config.json"), head_norm=True)
    slots = options.context + options.new_tokens + 64
    rows = row_buckets(max(options.batches))
    steps = {(n, t) for n in rows for t in (1, 1 + LENGTH)} | {
        (n, t) for n in options.batches for t in TOKENS
    }
    tasks = [(shape, getattr(torch, options.dtype), *step, slots, config) for step in (*steps, (_PROMPTS, 1))]
    in_processes(_compile, tasks, "sizes")


def _compile(task: tuple[Any, ...]) -> str:
    """In a process of its own: what went wrong, or nothing."""
    from specdec_kernels.experts import gpu
    from specdec_kernels.gpu.compiling import compiling_only, meta
    from specdec_kernels.projection import Stream

    *dense, config = task
    shape, dtype, tokens = dense[0], dense[1], dense[2] * dense[3]
    if error := compile_one(tuple(dense)):  # type: ignore[arg-type]
        return error
    hidden, size, count = shape.hidden, config["moe_intermediate_size"], config["num_experts"]
    try:
        with compiling_only(inspect=False):
            rows = meta(tokens, hidden, dtype=dtype)
            squares = meta(-(-hidden // 64), -(-tokens // 16) * 16, dtype=torch.float32)
            gpu.add_experts(
                Stream(rows, rows, squares),
                meta(count, hidden, dtype=dtype),
                meta(count, 2 * size, hidden, dtype=dtype),
                meta(count, hidden, size, dtype=dtype),
                meta(hidden, dtype=dtype),
                eps=1e-6,
                count=config["num_experts_per_tok"],
                normalize=config["norm_topk_prob"],
                activation="silu",
            )
    except Exception as error:
        return f"experts of {tokens} tokens: {error!r}"[:300]
    return ""


@contextlib.contextmanager
def cut_shape(shape: Path, layers: int | None) -> Iterator[Path]:
    """The folder of the shape, or of one with fewer layers."""
    if layers is None:
        yield shape
        return
    with tempfile.TemporaryDirectory() as folder:
        config = json.loads((shape / "config.json").read_text()) | {"num_hidden_layers": layers}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        yield Path(folder)


def main() -> None:
    options = _arguments()
    began = time.perf_counter()
    if options.device == "cuda":
        compile_ahead(options)
    report: dict[str, Any] = {"environment": environment_of(options.device, {}), "sections": {}}

    def left() -> float:
        return options.budget - (time.perf_counter() - began)

    def store(name: str, title: str, columns: Any, rows: list[dict[str, Any]]) -> None:
        report["sections"][name] = rows
        print(table(title, columns, rows), flush=True)
        if options.json:
            report["seconds"] = time.perf_counter() - began
            options.json.write_text(json.dumps(report, indent=1) + "\n")

    def fits(name: str) -> bool:
        if left() < LEAST[name]:
            print(f"{name}: left out, {left():.0f} s of the budget are left", flush=True)
        return left() >= LEAST[name]

    card = hardware.measure_copy(torch.device(options.device))
    store(
        "hardware",
        report["environment"]["device_name"],
        (Column("copy", "copy, TB/s", ".2f"),),
        [{"copy": card}],
    )
    with cut_shape(options.shape, options.layers) as shape, spread_weights(), without_advice():
        measure(options, shape, card * 1e12, store, fits, left)
    print(f"\n{time.perf_counter() - began:.0f} s in all", flush=True)


def measure(options: Any, shape: Path, rate: float, store: Any, fits: Any, left: Any) -> None:
    """All parts, each stored as soon as it is there."""
    from specdecode.testing import scripted

    scripted.install()
    engines = Engines(
        model=str(shape),
        keywords={
            "dtype": options.dtype,
            "device": options.device,
            "max_model_len": options.context + options.new_tokens + 64,
            "max_num_batched_tokens": _PROMPTS,
            "gpu_memory_utilization": 0.93,
            "async_scheduling": True,
        },
    )
    size = decoding.Size(
        batches=tuple(options.batches),
        context=options.context,
        new_tokens=options.new_tokens,
        repeats=options.repeats,
    )
    llm = engines.get("plain", max_num_seqs=max(size.batches))
    print(f"start-up of the plain engine: {engines.start_seconds['plain']:.1f} s", flush=True)
    plain: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    if fits("steps"):
        steps = step_rows(llm, options, rate, left)
        store("steps", "The target's step alone, by tokens of a row", STEPS, steps)
    if fits("plain"):
        middle = size.context + size.new_tokens // 2
        plain = with_floors(llm, decoding.rows(llm, "plain", size), steps, middle, rate)
        store("plain", "Plain decoding", decoding.COLUMNS, plain)
    if plain and fits("synthetic"):
        name, config = f"eagle k={LENGTH}, {ACCEPTANCE:g}", decoding.synthetic(ACCEPTANCE, LENGTH)
        llm = engines.get(name, max_num_seqs=max(size.batches), speculative_config=config)
        rows = decoding.rows(llm, name, size, plain=plain, steps=steps)
        store("synthetic", f"SYNTHETIC acceptance {ACCEPTANCE:g}: no real drafts", decoding.COLUMNS, rows)
    engines.close()


if __name__ == "__main__":
    main()
