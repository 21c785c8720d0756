"""What a row-parallel product costs on two GPUs, by each way in which its terms can be summed.

    NCCL_NVLS_ENABLE=0 python benchmarks/gpu/sums.py

Chains of a layer's two products, ``[4096, 2048]`` and ``[4096, 7168]`` (a rank's of the 8B shape on two),
in a graph; microseconds of both products and their sums:

    solo     no sum: what one GPU adds to its own stream
    product  the product's own epilogue sums (``specdec_kernels.ranks``)
    kernel   a kernel of its own sums, another one adds
    nccl     gathered by NCCL, added up by the kernel that adds
    sum      the kernel that sums alone, one sum
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable
from typing import Any

import torch
from specdec_kernels.projection import Stream, add, add_product, product
from specdec_kernels.ranks import Mail, sum_over_ranks
from specdecode.distributed import SOLO
from specdecode.distributed.group import CollectiveGroup
from specdecode.distributed.rendezvous import join, open_store, reach_store, wait_for_all
from tables import Column, table
from timing import captured, device_ms

RANKS, WIDTH, INPUTS, LAYERS, SUMS = 2, 4096, (2048, 7168), 8, 64
COLUMNS = (
    Column("tokens", "tokens"),
    *(Column(way, way, ".2f") for way in ("solo", "product", "kernel", "nccl", "sum")),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", default="1,8,32,96,192")
    parser.add_argument("--device", default="cuda", help="cpu: gloo, no graphs, to see that it runs")
    options = parser.parse_args()
    tokens = [int(part) for part in options.tokens.split(",")]
    store = open_store("127.0.0.1", RANKS)
    other = multiprocessing.get_context("spawn").Process(
        target=_measure, args=(1, store.port, tokens, options.device), daemon=True
    )
    other.start()
    wait_for_all(store, RANKS, lambda: None)
    rows = _measure(0, store, tokens, options.device)
    other.join(20)
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(table(f"Both row-parallel products of a layer on {RANKS} ranks, us, {name}", COLUMNS, rows))


def _measure(rank: int, store: Any, tokens: list[int], device: str) -> list[dict[str, Any]]:
    """``store``: rank 0's, or its port."""
    if rank:
        store = reach_store("127.0.0.1", store, rank, RANKS)
    place = torch.device(device, rank) if device == "cuda" else torch.device(device)
    group, release = join(store, rank, RANKS, device=place, told=SOLO, check=lambda: None)
    rows = [_row(group, count, place) for count in tokens]
    release.free()
    return rows


def _row(group: CollectiveGroup, tokens: int, device: torch.device) -> dict[str, Any]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    how: dict[str, Any] = {"dtype": dtype, "device": device}
    weights = [[torch.randn(WIDTH, size, **how) * 0.01 for size in INPUTS] for _ in range(LAYERS)]
    inputs = [torch.randn(tokens, size, **how) for size in INPUTS]
    begun, gain = torch.randn(tokens, WIDTH, **how), torch.ones(WIDTH, **how)
    mail = group.mail(begun)

    def chain(step: Callable[[torch.Tensor, torch.Tensor, Stream], Stream]) -> float:
        def body() -> None:
            stream = Stream(begun, begun, None)
            for layer in weights:
                for x, weight in zip(inputs, layer, strict=True):
                    stream = step(x, weight, stream)

        return _microseconds(body) / LAYERS

    def gathered(x: torch.Tensor, weight: torch.Tensor, stream: Stream) -> Stream:
        group.peers, peers = None, group.peers
        try:
            return add(group.terms(product(x, weight)), stream, gain)
        finally:
            group.peers = peers

    row = {
        "tokens": tokens,
        "solo": chain(lambda x, weight, stream: add_product(x, weight, None, stream, gain)),
        "nccl": chain(gathered),
    }
    if mail is not None:
        row |= _in_shared_memory(chain, mail, begun, gain)
    return row


def _in_shared_memory(
    chain: Callable[..., float], mail: Mail, begun: torch.Tensor, gain: torch.Tensor
) -> dict[str, float]:
    def sums() -> None:
        x = begun
        for _ in range(SUMS):
            x = sum_over_ranks(x, mail)

    return {
        "product": chain(lambda x, weight, stream: add_product(x, weight, None, stream, gain, mail=mail)),
        "kernel": chain(
            lambda x, weight, stream: add(sum_over_ranks(product(x, weight), mail)[None], stream, gain)
        ),
        "sum": _microseconds(sums) / SUMS,
    }


def _microseconds(body: Callable[[], None]) -> float:
    """Of its replays, as many on each rank."""
    return device_ms(captured(body), repeats=100) * 1e3


if __name__ == "__main__":
    main()
