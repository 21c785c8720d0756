"""200 streams against a server for two minutes, half of whose clients go away: nothing lost, nothing leaked.

    python benchmarks/serving_soak.py --streams 200 --seconds 120

Starts ``specdecode serve`` on a tiny random model with prompt lookup, and prints one JSON object. Ends with
status 1 if an answer was wrong or missing, if something still ran when all clients had gone, or if the
server's memory grew by more than ``--growth`` MiB between the first quarter and the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from specdecode.testing.serving import ServerProcess
from specdecode.testing.soak import Load, soak
from specdecode.testing.tiny import tiny_checkpoint

OPTIONS = ("--device", "cpu", "--dtype", "float32", "--spec-method", "ngram", "--spec-tokens", "4")


async def watched(load: Load, server: ServerProcess) -> tuple[Any, list[float]]:
    """What became of the requests, and the server's memory in MiB, read now and then."""
    memory: list[float] = []

    async def watch() -> None:
        while True:
            memory.append(server.resident_mib())
            await asyncio.sleep(load.seconds / 60)

    watching = asyncio.ensure_future(watch())
    told = await soak(load)
    watching.cancel()
    return told, memory


def readings(url: str, name: str) -> list[float]:
    """Values of a gauge."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    return [float(value) for value in re.findall(rf"^{name}\{{[^}}]*\}} (\S+)", text, re.MULTILINE)]


def left_running(url: str, patience: float = 5.0) -> float:
    """Requests that run or wait, ``patience`` seconds after all clients have gone at the latest."""
    deadline = time.monotonic() + patience
    while True:
        left = sum(readings(url, "vllm:num_requests_(?:running|waiting)"))
        left += httpx.get(f"{url}/health", timeout=30).json()["open_requests"]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--growth", type=float, default=32.0, metavar="MIB")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_checkpoint(Path(folder) / "tiny", output_scale=0.3, max_position_embeddings=1024)
        with ServerProcess(model, *OPTIONS) as server:
            load = Load(url=server.url, streams=given.streams, seconds=given.seconds)
            told, memory = asyncio.run(watched(load, server))
            left = left_running(server.url)
            (usage,) = readings(server.url, "vllm:kv_cache_usage_perc")
            status = server.end()
    early, late = max(memory[: len(memory) // 4 + 1]), memory[-1]
    result = {
        "streams": given.streams,
        "seconds": given.seconds,
        "finished": told.finished,
        "left": told.left,
        "tokens": told.tokens,
        "faults": told.faults[:10],
        "still_running": left,
        "kv_cache_usage": usage,
        "memory_mib": {"first": memory[0], "first_quarter": early, "end": late},
        "exit_status": status,
    }
    print(json.dumps(result))
    well = not told.faults and not left and not usage and status == 0
    return 0 if well and late - early <= given.growth else 1


if __name__ == "__main__":
    raise SystemExit(main())
