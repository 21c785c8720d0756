"""What proposing costs, and what memory takes, over many requests: measured without a model.

Requests write texts that repeat each other: one of some hundred forms, its fields filled in anew. Each step
proposes for one request at batch 1, and accepts what is right, as a target would. Times are the thread's CPU
time in ``propose`` alone: learning what was written, looking up, and writing the drafts into the buffers::

    python plugins/suffix/benchmarks/cost.py --requests 10000 --backend python

``--step-ms`` is what a step of the target takes, for the share in the table.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
from specdec_suffix.config import SuffixConfig
from specdec_suffix.plugin import specdecode_proposers
from specdecode.contract import Drafts, Place, Proposer, RequestInfo, StepView

VOCAB = 49_152
FORMS, FORM_TOKENS, FIELDS = 300, 160, 8


class Row:
    """One request as a host proposer is shown it."""

    def __init__(self, request_id: str, text: list[int], most: int) -> None:
        self._rows = {
            "request_ids": [request_id],
            "history": [text],
            "budget": np.array([most]),
            "room": np.array([most]),
        }

    def rows(self, name: str, place: Place) -> object:
        return self._rows[name]

    def limit(self, name: str, value: np.ndarray, bound: int, place: Place) -> np.ndarray:
        return np.minimum(value, bound)


def texts(count: int, prompt_tokens: int) -> Iterator[tuple[list[int], list[int]]]:
    """Prompt and output of each request."""
    rng = np.random.default_rng(0)
    forms = rng.zipf(1.2, (FORMS, FORM_TOKENS)) % VOCAB
    for _ in range(count):
        form = forms[rng.integers(FORMS)]
        cuts = np.sort(rng.integers(0, FORM_TOKENS, FIELDS))
        parts = np.split(form, cuts)
        fields = [rng.integers(0, VOCAB, rng.integers(1, 5)) for _ in range(FIELDS)]
        output = [part for pair in zip(parts, [*fields, fields[0]], strict=True) for part in pair]
        prompt = np.concatenate([rng.zipf(1.2, prompt_tokens) % VOCAB, *fields])
        yield prompt.tolist(), np.concatenate(output).tolist()


def serve(
    proposer: Proposer, needs: object, number: int, prompt: list[int], output: list[int]
) -> list[float]:
    """Decode one request; seconds of each call of ``propose``."""
    request_id, whole, done = f"r{number}", prompt + output, len(prompt) + 1
    proposer.on_add(
        RequestInfo(
            id=request_id,
            namespace="",
            token_ids=tuple(prompt),
            prompt_len=len(prompt),
            params=None,
            resumed=False,
        )
    )
    width = needs.width
    seconds = []
    while done < len(whole):
        out = Drafts(
            ids=np.zeros((1, width), np.int64),
            lens=np.zeros(1, np.int64),
            parents=np.arange(-1, width - 1)[None].copy(),
            score=np.zeros((1, width), np.float32),
        )
        view = StepView(needs, Row(request_id, whole[:done], len(whole) - done))
        start = time.thread_time()
        proposer.propose(view, out)
        seconds.append(time.thread_time() - start)
        drafts = out.ids[0, : out.lens[0]].tolist()
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == whole[done + accepted]:
            accepted += 1
        done += accepted + 1
    proposer.on_finish(request_id, "stop")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--backend", choices=["python", "arctic"], default="python")
    parser.add_argument(
        "--max-cached-tokens", type=int, default=SuffixConfig().suffix_decoding_max_cached_tokens
    )
    parser.add_argument("--step-ms", type=float, default=40.0, help="a step of the target at batch 1")
    arguments = parser.parse_args()
    config = SuffixConfig(
        backend=arguments.backend, suffix_decoding_max_cached_tokens=arguments.max_cached_tokens
    )
    (spec,) = specdecode_proposers()
    context = SimpleNamespace(target=SimpleNamespace(vocab_size=VOCAB))
    needs, proposer = spec.needs(config, context), spec.build(config, context)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(
        f"backend {arguments.backend}, prompts of {arguments.prompt_tokens} tokens, us of a call of propose\n"
    )
    print(
        "| requests | tokens a step | mean | median | p99 | first | share of a step | remembered | evicted "
        "| MiB |"
    )
    print("|" + " --- |" * 10)
    window: list[float] = []
    first: list[float] = []
    tokens = 0
    for number, (prompt, output) in enumerate(texts(arguments.requests, arguments.prompt_tokens), start=1):
        seconds = serve(proposer, needs, number, prompt, output)
        first.append(seconds[0])  # reads the prompt
        window += seconds
        tokens += len(output) - 1
        if number % max(1, arguments.requests // 10) == 0:
            told = proposer.metrics()
            mean = statistics.mean(window)
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
            print(
                f"| {number} | {tokens / len(window):.2f} | {mean * 1e6:.0f} | "
                f"{statistics.median(window) * 1e6:.0f} | {np.quantile(window, 0.99) * 1e6:.0f} | "
                f"{statistics.mean(first) * 1e6:.0f} | {mean * 1e5 / arguments.step_ms:.2f}% | "
                f"{told['cached_tokens']:.0f} | {told['evicted_requests']:.0f} | {grown:.0f} |",
                flush=True,
            )
            window, first, tokens = [], [], 0


if __name__ == "__main__":
    main()
