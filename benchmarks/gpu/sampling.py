"""What a step's sampling, verification, preparation and prompt lookup take on this card.

    python benchmarks/gpu/sampling.py [--quick] [--json PATH]

Logits of a vocabulary of 128256 in bfloat16, as lm_head leaves them in the L2 cache; a CUDA graph of several
rounds, microseconds a round, medians. ``peaked`` logits are like a model's, whose likeliest tokens stand out;
``flat`` ones like random weights', of which top-p keeps tens of thousands.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from specdec_kernels import matching, sampling, verification

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY = 128256
#: Rows of the batch and tokens of a row.
SHAPES = [(1, 1), (1, 6), (8, 6), (32, 6)]
#: Temperature, top-k, top-p, min-p of all rows; None: left out of the launch.
MODES: dict[str, tuple[float | None, int | None, float | None, float | None]] = {
    "greedy, known": (None, None, None, None),
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature": (0.8, 0, 1.0, 0.0),
    "top-k 50": (0.8, 50, 1.0, 0.0),
    "top-p 0.95": (0.8, 0, 0.95, 0.0),
    "top-k 50, top-p 0.95": (0.8, 50, 0.95, 0.0),
}
#: In one graph, so that what is timed is not its start.
ROUNDS = 20
BLOCK_SIZE = 16
COLUMNS = 64
HISTORIES = (1024, 8192, 131072)


def microseconds(work: Callable[[], Any], repeats: int) -> float:
    """Median time of one round of ``work``, captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(ROUNDS):
            work()
    times = []
    for turn in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if turn >= 3:
            times.append(start.elapsed_time(end) * 1e3 / ROUNDS)
    return statistics.median(times)


def logits(rows: int, kind: str) -> torch.Tensor:
    """``[rows, VOCABULARY]`` bfloat16."""
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    x = torch.randn(rows, VOCABULARY, device=DEVICE, generator=generator)
    if kind == "peaked":
        x = 2.0 * x + 4.0 * torch.rand(x.shape, device=DEVICE, generator=generator).log().neg().clamp(max=5)
    return x.bfloat16()


class Step:
    """State of ``batch`` rows of ``tokens`` tokens, all drafts of which are rejected, time and again."""

    def __init__(self, batch: int, tokens: int, kind: str, mode: str) -> None:
        def new(*size: int, value: int = 0) -> torch.Tensor:
            return torch.full(size, value, dtype=torch.int64, device=DEVICE)

        temperature, top_k, top_p, min_p = MODES[mode]

        def all_rows(value: float | None, dtype: torch.dtype) -> torch.Tensor | None:
            return None if value is None else torch.full((batch,), value, dtype=dtype, device=DEVICE)

        grid, width = (batch, tokens), max(tokens - 1, 1)
        self.tokens = tokens
        self.logits = logits(batch * tokens, kind)
        self.parameters = {
            "temperature": all_rows(temperature, torch.float32),
            "top_k": all_rows(top_k, torch.int64),
            "top_p": all_rows(top_p, torch.float32),
            "min_p": all_rows(min_p, torch.float32),
        }
        self.seed, self.index = torch.arange(batch, device=DEVICE), new(batch)
        self.rows = {
            "committed": new(batch, value=512),
            "limit": new(batch, value=2**30),
            "active": new(batch, value=1),
        }
        self.last, self.budget = new(batch), new(batch, value=tokens - 1)
        self.draft_ids, self.draft_lens = new(batch, width, value=7), new(batch, value=tokens - 1)
        self.table = torch.arange(batch * COLUMNS, device=DEVICE).view(batch, COLUMNS)
        names = ("ids", "positions", "write_slots", "base")
        self.inputs = {name: new(*grid) for name in names} | {
            "lens": new(batch),
            "parents": new(batch, tokens - 1),
        }
        self.faults = new(1)
        self.out = {
            "tokens": new(*grid),
            "counts": new(batch),
            "path": new(*grid),
            "history": torch.zeros(batch, 4096, dtype=torch.int32, device=DEVICE),
            "result": torch.zeros(batch, tokens + 3, dtype=torch.int32, device=DEVICE),
        }
        self.drawn = new(*grid)

    def draw(self) -> torch.Tensor:
        """The target's tokens."""
        return sampling.draw_tokens(
            self.logits,
            self.inputs["positions"].view(-1),
            seed=self.seed,
            index=self.index,
            tokens_per_row=self.tokens,
            **self.parameters,
        ).view(self.drawn.shape)

    def verify(self, drawn: torch.Tensor | None = None) -> None:
        """Acceptance, and the inputs of the next step."""
        verification.accept(
            self.drawn if drawn is None else drawn,
            self.inputs["ids"],
            self.inputs["lens"],
            None,
            **self.rows,
            **self.out,
        )
        verification.next_inputs(
            self.last,
            self.draft_ids,
            self.draft_lens,
            None,
            **self.rows,
            budget=self.budget,
            block_table=self.table,
            block_size=BLOCK_SIZE,
            vocab_size=VOCABULARY,
            depth=max(self.tokens - 1, 1),
            faults=self.faults,
            **self.inputs,
        )

    def run(self) -> None:
        """Both."""
        self.verify(self.draw())


def of_steps(repeats: int, modes: list[str]) -> list[dict[str, Any]]:
    """Times of drawing, of the rest, and of both in a row."""
    found = []
    print(f"{'rows':>8} {'logits':>7}  {'sampling':<22}{'draw':>8}{'verify':>8}{'both':>8}  us")
    for batch, tokens in SHAPES:
        for mode in modes:
            for kind in ("peaked", "flat") if "top" in mode else ("peaked",):
                step = Step(batch, tokens, kind, mode)
                draw, verify, both = (
                    microseconds(work, repeats) for work in (step.draw, step.verify, step.run)
                )
                found.append(
                    {
                        "batch": batch,
                        "tokens": tokens,
                        "logits": kind,
                        "sampling": mode,
                        "draw_us": draw,
                        "verify_us": verify,
                        "both_us": both,
                    }
                )
                print(
                    f"{batch:>4} x {tokens} {kind:>7}  {mode:<22}{draw:>8.1f}{verify:>8.1f}{both:>8.1f}",
                    flush=True,
                )
    return found


def of_matching(repeats: int) -> list[dict[str, Any]]:
    """Times of prompt lookup by the length of the texts, which match nowhere."""
    found = []
    print(f"\n{'texts':>6} {'tokens':>8}{'lookup':>8}  us")
    for batch in (1, 8, 32):
        for size in HISTORIES:
            history = torch.arange(batch * size, device=DEVICE).view(batch, size).int()
            lengths = torch.full((batch,), size, device=DEVICE)
            limits = torch.full((batch,), 5, device=DEVICE)

            def work(
                history: torch.Tensor = history,
                lengths: torch.Tensor = lengths,
                limits: torch.Tensor = limits,
            ) -> None:
                matching.match_ngrams(history, lengths, shortest=2, longest=5, width=5, limits=limits)

            time = microseconds(work, repeats)
            found.append({"texts": batch, "tokens": size, "lookup_us": time})
            print(f"{batch:>6} {size:>8}{time:>8.1f}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats, three of the samplings")
    parser.add_argument("--json", type=Path, help="write the times there")
    args = parser.parse_args()
    if DEVICE == "cpu":
        parser.error("there is no CUDA device")
    print(torch.cuda.get_device_name())
    repeats = 5 if args.quick else 15
    modes = ["greedy", "temperature", "top-k 50, top-p 0.95"] if args.quick else list(MODES)
    found = {
        "device": torch.cuda.get_device_name(),
        "steps": of_steps(repeats, modes),
        "matching": of_matching(repeats),
    }
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
