"""specdecode behind NVIDIA Triton by nvidia-pytriton, which brings Triton along.

    pip install nvidia-pytriton specdec-core specdec-draft specdec-ngram
    python with_pytriton.py --model TARGET --draft-model DRAFT --num-speculative-tokens 5

A request of the model ``specdecode`` has ``PROMPT`` and, optionally, ``MAX_TOKENS`` and ``TEMPERATURE``.
Answers stream ``TEXT``, one piece each, with ``ACCEPTED_TOKENS`` so far.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig
from specdecode import AsyncLLM, RequestOutputKind, SamplingParams
from specdecode.contract import SpecdecodeError

INPUTS = [
    Tensor(name="PROMPT", dtype=bytes, shape=(1,)),
    Tensor(name="MAX_TOKENS", dtype=np.int32, shape=(1,), optional=True),
    Tensor(name="TEMPERATURE", dtype=np.float32, shape=(1,), optional=True),
]
OUTPUTS = [
    Tensor(name="TEXT", dtype=bytes, shape=(1,)),
    Tensor(name="ACCEPTED_TOKENS", dtype=np.int32, shape=(1,)),
]


class Answers:
    """The inference callable: Triton calls it in a thread for each instance; the engine batches them."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._ids = itertools.count()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def __call__(self, requests: list[Any]) -> Iterator[list[dict[str, np.ndarray]]]:
        (request,) = requests  # batching is off
        given = request.data
        params = SamplingParams(
            max_tokens=int(given["MAX_TOKENS"].item()) if "MAX_TOKENS" in given else 128,
            temperature=float(given["TEMPERATURE"].item()) if "TEMPERATURE" in given else 0.0,
            output_kind=RequestOutputKind.DELTA,
        )
        pieces: queue.SimpleQueue[Any] = queue.SimpleQueue()
        prompt = given["PROMPT"].item().decode()
        writing = asyncio.run_coroutine_threadsafe(self._write(prompt, params, pieces), self._loop)
        try:
            while (output := pieces.get()) is not None:
                yield [
                    {
                        "TEXT": np.array([output.outputs[0].text.encode()]),
                        "ACCEPTED_TOKENS": np.array([output.metrics.accepted], dtype=np.int32),
                    }
                ]
            writing.result()  # raises what ended it
        finally:
            writing.cancel()  # of a client that went away; nothing otherwise

    async def _write(self, prompt: str, params: SamplingParams, pieces: queue.SimpleQueue[Any]) -> None:
        try:
            async for output in self._llm.generate(prompt, params, f"triton-{next(self._ids)}"):
                pieces.put(output)
        except SpecdecodeError as error:
            raise RuntimeError(str(error)) from error  # Triton tells a client the message
        finally:
            pieces.put(None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="the target: a directory or .gguf file")
    parser.add_argument("--draft-model", help="the draft checkpoint")
    parser.add_argument("--method", help="draft method; without: what the draft checkpoint says it is")
    parser.add_argument("--num-speculative-tokens", type=int, help="drafts a step")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--concurrency", type=int, default=32, help="requests at a time")
    parser.add_argument("--http-port", type=int, default=8000)
    parser.add_argument("--grpc-port", type=int, default=8001)
    parser.add_argument("--metrics-port", type=int, default=8002)
    args = parser.parse_args()
    keys = {
        "model": args.draft_model,
        "method": args.method,
        "num_speculative_tokens": args.num_speculative_tokens,
    }
    speculation = {name: value for name, value in keys.items() if value is not None}
    llm = AsyncLLM(args.model, speculative_config=speculation or None, device=args.device)
    ports = TritonConfig(http_port=args.http_port, grpc_port=args.grpc_port, metrics_port=args.metrics_port)
    answers = Answers(llm)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # leave the blocks below
    try:
        with Triton(config=ports) as triton:
            triton.bind(
                model_name="specdecode",
                infer_func=[answers] * args.concurrency,
                inputs=INPUTS,
                outputs=OUTPUTS,
                config=ModelConfig(batching=False, decoupled=True, batcher=DynamicBatcher()),
            )
            triton.serve()
    finally:
        llm.shutdown()


if __name__ == "__main__":
    main()
