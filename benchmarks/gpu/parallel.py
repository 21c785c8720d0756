"""Tensor parallelism on a machine of several GPUs: equal outputs, and what a token costs.

    python benchmarks/gpu/parallel.py --json parallel.json
    python benchmarks/gpu/parallel.py --sizes 1,2 --shapes 8b --budget 300 --json parallel.json

    equality  in float32, on weights from files: outputs of 1 rank against those of 2 (and 4), plain and by
              each method. They are equal, or parted by a rounding that is told
    times     random weights in the shapes of 8B and 70B models, in bfloat16: plain, with an EAGLE-3 head, and
              with a 1B draft on every rank or shared out, drafts accepted by rate. A floor is the bytes of a
              step, weights and KV of one rank, at the rate at which its card reads
    death     a worker is killed in the middle of a call: seconds until the call ends with an error

``--all-reduce nccl`` and ``auto`` compare the two ways in which small sums over ranks are made
(docs/parallel.md).

Each measurement is a process of its own, with a time limit, so that one that hangs costs its own figures
alone, and tells where it stood. One whose steps cannot be captured is repeated without graphs, and says why.
The JSON file is written after each row.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from decoding import head
from hardware import _bandwidth, floor_ms
from tables import Column, table
from timing import Workload, decode_row, random_prompts

FOLDER = Path(__file__).parent
#: Shape -> its folder, a head's and a draft model's, and bytes of its weights in bfloat16.
SHAPES = {
    "8b": ("llama-8b-shape", "eagle3-8b-shape", "llama-1b-shape", 16.1e9),
    "70b": ("llama-70b-shape", "eagle3-70b-shape", "llama-1b-shape", 141.1e9),
}
#: Drafts, and the mean of tokens a verification that they are accepted for.
LENGTH, ACCEPTED = 3, 2.6
DRAFT_LENGTH, DRAFT_ACCEPTED = 5, 3.4
METHODS = ("plain", "eagle3", "draft on every rank", "draft shared out")
#: Share of a card's memory that weights may take: the rest is KV, steps and a head.
_FITS = 0.9
#: Seconds that a measurement may take, and that one needs at the least.
_LIMIT, _LEAST = 240.0, 40.0
#: Seconds from the start of a call to the death of a worker.
_MIDDLE = 0.5

TIMES = (
    Column("shape", "shape"),
    Column("ranks", "ranks"),
    Column("method", "method"),
    Column("batch", "batch"),
    Column("ms_per_token", "ms/token", ".3f"),
    Column("ms_per_step", "ms/step", ".3f"),
    Column("tokens_per_step", "tokens/step", ".2f"),
    Column("scaling", "x 1 rank", ".2f"),
    Column("speedup", "x plain", ".2f"),
    Column("floor_ms", "floor", ".2f"),
    Column("of_floor", "step/floor", ".2f"),
    Column("graphs", "graphs"),
    Column("sums", "sums"),
    Column("spread", "spread", ".1%"),
    Column("start_s", "start, s", ".0f"),
)
DEATH = (
    Column("ranks", "ranks"),
    Column("seconds", "seconds to the error", ".1f"),
    Column("shutdown_s", "to the end of shutdown", ".1f"),
    Column("error", "error"),
    Column("left", "processes left"),
    Column("graphs", "graphs"),
)
EQUAL = (
    Column("ranks", "ranks"),
    Column("method", "method"),
    Column("equal", "equal"),
    Column("ties", "ties"),
    Column("bugs", "bugs"),
    Column("accepted", "accepted"),
    Column("graphs", "graphs"),
    Column("told", "told"),
)


def main() -> None:
    options = _arguments()
    if options.one is not None:
        _one(json.loads(options.one))
        return
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if options.all_reduce is not None:
        os.environ["SPECDECODE_ALL_REDUCE"] = options.all_reduce
    # What runs is a group of its own, which a signal to this process does not reach.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    run = _Run(options)
    run.equality()
    run.times()
    run.death()
    print(table("Tensor parallelism: outputs", EQUAL, run.found["equality"]))
    print(table(f"Tensor parallelism: times, {run.card}", TIMES, run.found["times"]))
    print(table("Tensor parallelism: a killed worker", DEATH, run.found["death"]), flush=True)
    if any(row.get("bugs") for row in run.found["equality"]):
        raise SystemExit("outputs differ by more than rounding")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=_numbers, help="numbers of ranks; none: 1, 2, 4 as far as GPUs go")
    parser.add_argument("--shapes", type=lambda text: text.split(","), default=list(SHAPES))
    parser.add_argument("--batches", type=_numbers, default=[1, 8])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--budget", type=float, default=570, help="seconds; what does not fit is left out")
    parser.add_argument("--limit", type=float, default=_LIMIT, help="seconds of one measurement at most")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--all-reduce", choices=["nccl", "auto"], help="none: as the environment has it")
    parser.add_argument("--dtype", default="bfloat16", help="of the times; equality is in float32")
    parser.add_argument(
        "--sections", type=lambda text: text.split(","), default=["equality", "times", "death"]
    )
    parser.add_argument(
        "--methods", type=lambda text: text.split(","), default=list(METHODS), help="of times"
    )
    parser.add_argument(
        "--equality", type=lambda text: text.split(";"), help="of its methods those named, parted by ';'"
    )
    parser.add_argument("--folders", type=json.loads, help="another table of shapes: for tests")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


class _Run:
    """What is measured in turn, and what was found so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.started = time.perf_counter()
        self.found: dict[str, list[dict[str, Any]]] = {
            "hardware": [], "equality": [], "times": [], "death": [],
        }  # fmt: skip
        self.shapes = options.folders or {
            name: [*(str(FOLDER / part) for part in parts[:3]), parts[3]] for name, parts in SHAPES.items()
        }
        on_gpus = options.device == "cuda"
        there = torch.cuda.device_count() if on_gpus else 4
        self.sizes = options.sizes or [size for size in (1, 2, 4) if size <= there]
        self.card = torch.cuda.get_device_name(0) if on_gpus else "CPU"
        self.memory = torch.cuda.get_device_properties(0).total_memory if on_gpus else float("inf")
        self.read = self._hardware()

    def left(self) -> float:
        return self.options.budget - (time.perf_counter() - self.started)

    def _hardware(self) -> float:
        rows = self._measure({"what": "hardware", "device": self.options.device}).get("rows", [])
        self.found["hardware"] += rows
        read = rows[0]["read"] if rows else None
        print(f"{self.card}: reads {read or 0:.2f} TB/s", flush=True)
        return (read or float("nan")) * 1e12

    def equality(self) -> None:
        """Each method on each number of ranks beside one rank."""
        if "equality" not in self.options.sections:
            return
        for size in self.sizes:
            if size == 1:
                continue
            wish = {"what": "equality", "size": size, "device": self.options.device}
            wish["only"] = self.options.equality
            for row in self._tried(wish, f"equality on {size} ranks").get("rows", ()):
                self._keep("equality", row)

    def times(self) -> None:
        """Each shape that fits, plain first; the figures that matter most come first."""
        if "times" not in self.options.sections:
            return
        cases = [
            (shape, size, method)
            for shape in self.options.shapes
            for method in self.options.methods
            for size in self.sizes
            if not (size == 1 and method == "draft shared out")
            and not (shape != "8b" and method.startswith("draft"))
        ]
        for shape, size, method in cases:
            model, eagle3, draft, num_bytes = self.shapes[shape]
            title = f"{shape}, {size} ranks, {method}"
            if num_bytes / size > _FITS * self.memory:
                print(
                    f"{title}: does not fit, {num_bytes / size / 2**30:.0f} GiB of weights a card", flush=True
                )
                continue
            wish = {
                "what": "times",
                "shape": shape,
                "model": model,
                "size": size,
                "method": method,
                "speculative": _speculative(method, eagle3, draft, size),
                "read": self.read,
                "full": num_bytes / size > 0.7 * self.memory,
                **{
                    key: getattr(self.options, key)
                    for key in ("device", "dtype", "batches", "context", "repeats")
                },
                "new_tokens": self.options.new_tokens,
            }
            for row in self._tried(wish, title).get("rows", ()):
                self._keep("times", self._beside(row))

    def death(self) -> None:
        """What becomes of a call whose worker is killed."""
        sizes = [size for size in self.sizes if size > 1]
        if "death" not in self.options.sections or not sizes:
            return
        wish = {"what": "death", "size": sizes[0], "device": self.options.device}
        for row in self._tried(wish, f"a worker of {sizes[0]} ranks is killed").get("rows", ()):
            self._keep("death", row)

    def _beside(self, row: dict[str, Any]) -> dict[str, Any]:
        def other(**keys: Any) -> dict[str, Any] | None:
            wanted = {"shape": row["shape"], "batch": row["batch"], **keys}
            rows = self.found["times"]
            return next((r for r in rows if all(r.get(k) == v for k, v in wanted.items())), None)

        one, plain = other(ranks=1, method=row["method"]), other(ranks=row["ranks"], method="plain")
        if one is not None:
            row["scaling"] = one["ms_per_token"] / row["ms_per_token"]
        if plain is not None:
            row["speedup"] = plain["ms_per_token"] / row["ms_per_token"]
        return row

    def _keep(self, section: str, row: dict[str, Any]) -> None:
        self.found[section].append(row)
        columns = {"times": TIMES, "equality": EQUAL, "death": DEATH}[section]
        print("  " + ", ".join(f"{c.title} {c.cell(row)}" for c in columns if c.key in row), flush=True)
        if self.options.json:
            content = {"card": self.card, "torch": torch.__version__, "sections": self.found}
            self.options.json.write_text(json.dumps(content, indent=1))

    def _tried(self, wish: dict[str, Any], title: str) -> dict[str, Any]:
        """Measured with graphs, or where that fails without."""
        print(title, flush=True)
        for eager in (False, True):
            if self.left() < _LEAST:
                print(f"  left out: {self.left():.0f} s of the budget are left", flush=True)
                return {}
            found = self._measure(wish | {"eager": eager})
            if "error" not in found:
                return found
            print(f"  {'without' if eager else 'with'} graphs: {found['error']}", flush=True)
            if found.get("rows"):
                return found
            if self.options.device != "cuda" or "out of memory" in found["error"]:
                break
        return {}

    def _measure(self, wish: dict[str, Any]) -> dict[str, Any]:
        """In a process of its own."""
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "found.json"
            command = [sys.executable, __file__, "--one", json.dumps(wish | {"out": str(out)})]
            process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True)
            try:
                _, errors = process.communicate(timeout=max(10.0, min(self.options.limit, self.left())))
                problem = f"exit {process.returncode}:\n{_tail(errors)}" if process.returncode else None
            except subprocess.TimeoutExpired:
                os.kill(process.pid, signal.SIGUSR1)  # it tells where it stands
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(1.0)
                _kill(process)
                _, errors = process.communicate()
                problem = f"took too long and was ended; its last lines:\n{_tail(errors, 80)}"
            finally:
                _kill(process)
            found = json.loads(out.read_text()) if out.is_file() else {}
            return found if problem is None else found | {"error": problem}


def _kill(process: subprocess.Popen[str]) -> None:
    """End a process and all of its group: ranks may outlive the one that started them."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _tail(text: str, lines: int = 12) -> str:
    return "\n".join("    " + line[:300] for line in text.strip().splitlines()[-lines:])


def _speculative(method: str, eagle3: str, draft: str, size: int) -> dict[str, Any] | None:
    if method == "plain":
        return None
    if method == "eagle3":
        return head("eagle3", eagle3, LENGTH, ACCEPTED)
    ranks = size if method == "draft shared out" else 1
    return head("draft_model", draft, DRAFT_LENGTH, DRAFT_ACCEPTED) | {"draft_tensor_parallel_size": ranks}


# -- in a process of its own ------------------------------------------------------------------------------
def _one(wish: dict[str, Any]) -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    peers = logging.getLogger("specdecode.distributed.peers")  # tells how sums are made, and why
    peers.setLevel(logging.INFO)
    peers.addHandler(logging.StreamHandler(sys.stdout))
    out, rows = Path(wish["out"]), []
    what = {"hardware": _hardware, "equality": _equality, "times": _times, "death": _death}[wish["what"]]
    for row in what(wish):
        rows.append(row)
        out.with_suffix(".part").write_text(json.dumps({"rows": rows}))
        out.with_suffix(".part").replace(out)


def _hardware(wish: dict[str, Any]) -> Iterator[dict[str, Any]]:
    copy, read = _bandwidth(torch.device(wish["device"]))
    yield {"copy": copy, "read": read}


def _times(wish: dict[str, Any]) -> Iterator[dict[str, Any]]:
    from specdecode import LLM

    started = time.perf_counter()
    llm = LLM(
        wish["model"],
        tensor_parallel_size=wish["size"],
        speculative_config=wish["speculative"],
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        dtype=wish["dtype"],
        device=wish["device"],
        max_num_seqs=max(wish["batches"]),
        max_model_len=max(1024, wish["context"] + wish["new_tokens"] + 64),
        max_num_batched_tokens=2048 if wish["full"] else 8192,
        gpu_memory_utilization=0.95 if wish["full"] else 0.85,
        enforce_eager=wish["eager"],
    )
    start = time.perf_counter() - started
    core = llm.llm_engine.core
    captured = bool(getattr(getattr(core, "steady", None), "captured", False))
    for batch in wish["batches"]:
        work = Workload(
            batch=batch,
            context=wish["context"],
            new_tokens=wish["new_tokens"],
            repeats=wish["repeats"],
            prompts=lambda batch, seed: random_prompts(
                batch, wish["context"], llm.llm_engine.target.vocab_size, seed
            ),
        )
        row = decode_row(llm, work)
        floor = floor_ms(core.runner.model, batch, wish["context"] + wish["new_tokens"] // 2, wish["read"])
        yield {
            "shape": wish["shape"],
            "ranks": wish["size"],
            "method": wish["method"],
            **row,
            "floor_ms": floor,
            "of_floor": row["ms_per_step"] / floor
            if row["ms_per_step"] and wish["method"] == "plain"
            else None,
            "graphs": "yes" if captured else "no",
            "sums": _sums(llm),
            "start_s": start,
        }
    llm.shutdown()


def _equality(wish: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Mixed requests by each method on ``size`` ranks; the same engine on one rank tells what parted them."""
    from specdecode.testing.divergence import explain_divergence
    from specdecode.testing.lossless import Engine, requests
    from specdecode.testing.tiny import tiny_checkpoint

    size, on_gpus = wish["size"], wish["device"] == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        wide = {
            "hidden_size": 512,
            "intermediate_size": 1024,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
        }
        shape = {**wide, "head_dim": 64, "num_hidden_layers": 6} if on_gpus else {"num_hidden_layers": 4}
        target = tiny_checkpoint(f"{folder}/target", output_scale=0.3, max_position_embeddings=512, **shape)
        options = {
            "device": wish["device"],
            "order": "late",
            "max_num_batched_tokens": 256,
            "num_gpu_blocks_override": 600,
            "block_size": 16,
            "enforce_eager": wish["eager"],
        }
        prompts, params = requests(8)
        one = Engine(target, **options)
        expected = one(prompts, params)
        for name, config in _methods(folder, target, size).items():
            if wish["only"] and name not in wish["only"]:
                continue
            engine = Engine(target, config, tensor_parallel_size=size, **options)
            outputs = engine(prompts, params)
            core = engine.llm.llm_engine.core
            parted = [
                explain_divergence(one.llm, prompt, want, got, wished)
                for prompt, wished, want, got in zip(prompts, params, expected, outputs, strict=True)
            ]
            kinds = [part.kind for part in parted if part is not None]
            yield {
                "ranks": size,
                "method": name,
                "equal": len(parted) - len(kinds),
                "ties": kinds.count("tie"),
                "bugs": kinds.count("bug"),
                "accepted": int(engine.accepted),
                "graphs": "yes" if getattr(core.steady, "captured", False) else "no",
                "told": "; ".join(str(part) for part in parted if part is not None)[:400] or None,
            }
            engine.llm.shutdown()


def _death(wish: dict[str, Any]) -> Iterator[dict[str, Any]]:
    from specdecode import LLM, SamplingParams
    from specdecode.testing.tiny import tiny_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        target = tiny_checkpoint(f"{folder}/target", max_position_embeddings=4096)
        llm = LLM(
            str(target),
            tensor_parallel_size=wish["size"],
            device=wish["device"],
            dtype="float32",
            skip_tokenizer_init=True,
            max_num_seqs=4,
            num_gpu_blocks_override=1100,
            enforce_eager=wish["eager"],
        )
        captured = bool(getattr(getattr(llm.llm_engine.core, "steady", None), "captured", False))
        (pid, *others) = llm.llm_engine.worker_pids
        prompt = [{"prompt_token_ids": [5, 6, 7]}]
        short = SamplingParams(max_tokens=8, n=4, temperature=1.0, ignore_eos=True)
        llm.generate(prompt, short, use_tqdm=False)  # compiles: the next call is all steps
        print(f"  started, sums by {_sums(llm)}; a worker dies in {_MIDDLE} s", flush=True)
        killed: list[float] = []

        def kill() -> None:
            killed.append(time.perf_counter())
            os.kill(pid, signal.SIGKILL)

        threading.Timer(_MIDDLE, kill).start()
        error = "none: the call ended before"
        params = SamplingParams(max_tokens=4000, n=4, temperature=1.0, ignore_eos=True)
        try:
            llm.generate(prompt, params, use_tqdm=False)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        seconds = time.perf_counter() - killed[0] if killed else float("nan")
        print(f"  the call ended after {seconds:.1f} s: {error}", flush=True)
        llm.shutdown()
        shutdown = time.perf_counter() - killed[0] if killed else float("nan")
        yield {
            "ranks": wish["size"],
            "seconds": seconds,
            "shutdown_s": shutdown,
            "error": error[:300],
            "left": sum(Path(f"/proc/{other}").exists() for other in (pid, *others)),
            "graphs": "yes" if captured else "no",
        }


def _sums(llm: Any) -> str | None:
    """How small sums over the ranks are made; None for one rank."""
    group = llm.llm_engine._ranks.group
    if group.size == 1:
        return None
    return "process group" if group.peers is None else "shared memory"


def _methods(folder: str, target: Path, size: int) -> dict[str, Any]:
    from specdec_eagle.testing import write_head
    from specdec_medusa.testing import write_heads
    from specdec_mlp.testing import write_speculator

    four = {"num_speculative_tokens": 4}
    eagle3 = {
        "method": "eagle3",
        "aux_layer_ids": [1, 2, 3],
        "model": str(write_head(f"{folder}/e3", "eagle3", target)),
    }
    draft = {"method": "draft_model", "model": str(target), "num_speculative_tokens": 3}
    return {
        "plain": None,
        "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, **four},
        "suffix": {"method": "suffix", **four},
        "draft on every rank": draft,
        "draft shared out": draft | {"draft_tensor_parallel_size": size},
        "eagle3": eagle3 | four,
        "eagle3, tree": eagle3 | {"num_speculative_tokens": 8, "tree_top_k": 3, "tree_depth": 4},
        "medusa": {
            "method": "medusa",
            "model": str(write_heads(f"{folder}/m", "medusa-1", target, fit=False)),
        },
        "mlp": {
            "method": "mlp_speculator",
            "model": str(write_speculator(f"{folder}/s", target, fit=False)),
        },
    }


if __name__ == "__main__":
    main()
