"""A load sweep of the server: plain, fixed and adaptive drafting at several rates, as table, JSON and plot.

    python benchmarks/gpu/serving.py --model PATH --spec '{"method": "ngram", "num_speculative_tokens": 5}' \
        --rates 1,4,16,64 --seconds 30 --out FOLDER

Two servers run one after the other: one with ``"adaptive": true`` in the given ``speculative_config``, one
without. On the first, requests without speculation and with it come in turn at every rate, the same prompts
at the same times, so that adaptive drafting has a plain side of its own minute. The JSON file is written
after each rate of a side. Wants ``specdec-core[serve,plot]``.
Ends with status 1 if a request failed, or if adaptive drafting gave less than 0.97 times the tokens of
its plain side.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from specdecode.bench.load import Run, Side, Target, count_requests, run_load
from specdecode.bench.load_report import Objectives, Row, as_json, plot, row_of, table_of
from specdecode.bench.tasks import builtin_tasks
from specdecode.testing.serving import ServerProcess

#: Least share of the plain token rate that adaptive drafting may give.
FLOOR = 0.97


PLAIN = Side(name="plain", body={"speculation": False})


def runs(given: argparse.Namespace, config: dict, sides: Sequence[Side]) -> Iterator[Run]:
    """All rates on one server, ``sides`` in turn."""
    prompts = [prompt.text for task in builtin_tasks() for prompt in task.prompts]
    options = ["--spec-config", json.dumps(config), "--served-model-name", "target", *given.serve]
    with ServerProcess(given.model, *options) as server:
        target = Target(url=server.url, model="target", max_tokens=given.max_tokens, ignore_eos=True)
        for side in sides:
            # Kernels are compiled, and no side finds more prompts in the prefix cache than another.
            asyncio.run(run_load(target, side, prompts, math.inf, len(prompts)))
        for rate in given.rates:
            for side in sides:
                count = count_requests(rate, given.seconds, len(prompts))
                yield asyncio.run(run_load(target, side, prompts, rate, count))
        server.end()


def shortfalls(rows: list[Row]) -> list[str]:
    """Where adaptive drafting gave less than it may."""
    plain = {row.rate: row for row in rows if row.side == PLAIN.name}
    shares = [
        (row.rate, row.output_tokens_per_s / plain[row.rate].output_tokens_per_s)
        for row in rows
        if row.side == "adaptive"
    ]
    return [f"adaptive gave {share:.3f}x plain at rate {rate}" for rate, share in shares if share < FLOOR]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--spec", type=json.loads, required=True, metavar="JSON")
    parser.add_argument(
        "--rates", type=lambda text: [float(part) for part in text.split(",")], default=[1, 4, 16, 64]
    )
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("serve", nargs="*", help="further options of specdecode serve, behind --")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    environment = {"model": given.model, "speculative_config": given.spec, "seconds": given.seconds}
    rows: list[Row] = []
    for run in itertools.chain(
        runs(given, {**given.spec, "adaptive": True}, [PLAIN, Side(name="adaptive")]),
        runs(given, given.spec, [Side(name="fixed")]),
    ):
        rows.append(row := row_of(run, Objectives()))
        rows.sort(key=lambda row: row.rate or math.inf)
        (given.out / "serving.json").write_text(json.dumps(as_json(environment, rows), indent=1) + "\n")
        print(f"{row.side} at {row.rate:g} a second: {row.output_tokens_per_s:.0f} tokens/s", flush=True)
    plot(rows, given.out / "serving.png", f"{Path(given.model).name}, {given.seconds:g} s each")
    Console(width=140).print(table_of(rows, "Load sweep; times are P50/P95/P99"))
    for message in (short := shortfalls(rows)):
        print(message)
    return 1 if short or any(row.failed for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
