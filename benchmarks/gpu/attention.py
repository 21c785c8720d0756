"""Paged attention of the 8B shape on this card: time by mode beside its KV floor, and equality of bits.

    python benchmarks/gpu/attention.py [--quick] [--warps 4 8] [--tiles-in-flight 2 3] [--prefill]

A CUDA graph of 32 launches over 32 layers' caches, so that the L2 cache does not help; ms for all 32.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence

import torch
from specdec_kernels.attention import AttentionMetadata, gpu
from specdec_kernels.attention.gpu_kernel import BY_CHUNK, BY_TILE, SERIAL

LAYERS, HEADS, KV_HEADS, DIM, BLOCK = 32, 32, 8, 128, 16
SCALE = DIM**-0.5
MODES = {"auto": None, "serial": SERIAL, "by chunk": BY_CHUNK, "by tile": BY_TILE}
#: rows, tokens of a row, context
SHAPES = [
    *((1, 1, 512), (8, 1, 512), (32, 1, 512), (1, 6, 512), (8, 6, 512), (32, 6, 512)),
    *((8, 1, 2048), (8, 6, 2048), (32, 1, 2048)),
]


class Caches:
    """Keys and values of ``layers`` layers with room for ``slots`` slots, in one allocation."""

    def __init__(self, layers: int, slots: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.blocks = slots // BLOCK + 1
        shape = (layers, 2, self.blocks, BLOCK, KV_HEADS, DIM)
        self._all = torch.empty(shape, device="cuda", dtype=dtype).normal_()
        self.layers = [tuple(pair) for pair in self._all]

    def table(self, rows: int, slots: int) -> torch.Tensor:
        """``[rows, columns]`` blocks in no order."""
        columns = -(-slots // BLOCK)
        order = torch.randperm(self.blocks - 1, generator=torch.Generator().manual_seed(1))[: rows * columns]
        return (order + 1).view(rows, columns).cuda()


def metadata(
    table: torch.Tensor,
    base: torch.Tensor,
    counts: Sequence[int],
    *,
    listed: bool = False,
    max_slots: int | None = None,
) -> AttentionMetadata:
    """Of ``counts`` tokens a row, which see the slots below ``base``."""
    rows = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).cuda()
    return AttentionMetadata(
        rows,
        base - 1,
        torch.zeros_like(rows),
        base,
        table,
        BLOCK,
        tokens_per_row=None if listed else counts[0],
        lengths=tuple(counts) if listed else None,
        max_slots=max_slots,
    )


def decode_base(contexts: Sequence[int], tokens: int) -> torch.Tensor:
    """What ``tokens`` new tokens behind each context see: all up to themselves."""
    return torch.tensor([context + t + 1 for context in contexts for t in range(tokens)]).cuda()


def time_graph(step: Callable[[], object], repeats: int = 21) -> float:
    """Median ms of a captured ``step``."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


@contextlib.contextmanager
def setting(**values: object) -> Iterator[None]:
    """Constants of the kernel's host side, set for a while."""
    kept = {name: getattr(gpu, name) for name in values}
    try:
        for name, value in values.items():
            setattr(gpu, name, value)
        yield
    finally:
        for name, value in kept.items():
            setattr(gpu, name, value)


def attend(
    caches: Caches, query: torch.Tensor, meta: AttentionMetadata, mode: int | None = None
) -> torch.Tensor:
    """All layers, one after the other; the last one's result."""
    for keys, values in caches.layers:
        out = gpu.paged_attention(query, keys, values, meta, scale=SCALE, window=None, mode=mode)
    return out


def decode_times(max_slots: int, bandwidth: float, shapes: Sequence[tuple[int, int, int]]) -> None:
    """One line a shape: ms for 32 layers, by mode."""
    caches = Caches(LAYERS, max(rows * (context + tokens + BLOCK) for rows, tokens, context in shapes))
    print(f"ms for {LAYERS} layers, floor at {bandwidth:g} TB/s")
    print(f"rows x tokens, context | KV floor | {' | '.join(MODES)}")
    for rows, tokens, context in shapes:
        table = caches.table(rows, context + tokens)
        query = torch.randn(rows * tokens, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        base = decode_base([context] * rows, tokens)
        floor = LAYERS * rows * (context + tokens) * 2 * KV_HEADS * DIM * 2 / bandwidth / 1e9
        times = []
        for name, mode in MODES.items():
            if name == "by tile" and max_slots > 8192:
                continue  # refused: so many partial results
            meta = metadata(table, base, [tokens] * rows, max_slots=max_slots)
            times.append(time_graph(functools.partial(attend, caches, query, meta, mode)))
        print(
            f"{rows} x {tokens}, {context} | {floor:.3f} | " + " | ".join(f"{t:.3f}" for t in times),
            flush=True,
        )


def prefill_times(shapes: Sequence[tuple[int, int]] = ((1, 512), (4, 2048), (1, 8192))) -> None:
    """One line a shape: ms of a layer and TFLOP/s, by query rows a tile."""
    print("prefill rows x tokens | " + " | ".join(f"{rows or 32} query rows" for rows in (None, 64, 128)))
    caches = Caches(2, max(rows * (tokens + BLOCK) for rows, tokens in shapes))
    for rows, tokens in shapes:
        query = torch.randn(rows * tokens, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        table, base = caches.table(rows, tokens), decode_base([0] * rows, tokens)
        cells = []
        for wide in (None, 64, 128):
            with setting(WIDE_QUERY_ROWS=wide):
                meta = metadata(table, base, [tokens] * rows, listed=True)
                ms = time_graph(functools.partial(attend, caches, query, meta), 7) / 2
            cells.append(f"{ms:.3f} ms {2 * rows * tokens**2 * HEADS * DIM / ms / 1e9:.0f} TFLOP/s")
        print(f"{rows} x {tokens} | " + " | ".join(cells), flush=True)


def definition(caches: Caches, query: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
    """The last layer's result in float32, from gathered keys and values."""
    keys, values = caches.layers[-1]
    at = (meta.block_table[:, :, None] * BLOCK + torch.arange(BLOCK, device="cuda")).flatten(1)
    out = []
    for token, row in enumerate(meta.rows.tolist()):
        slots = at[row, : int(meta.base[token])]
        k, v = (cache.flatten(0, 1)[slots].float() for cache in (keys, values))
        q = query[token].float().unflatten(0, (KV_HEADS, -1))
        weights = (torch.einsum("hgd,shd->hgs", q, k) * SCALE).softmax(-1)
        out.append(torch.einsum("hgs,shd->hgd", weights, v).flatten(0, 1))
    return torch.stack(out)


def _report(name: str, got: torch.Tensor, want: torch.Tensor) -> bool:
    differing = int((got != want).sum())
    print(
        f"  {name}: {differing} of {want.numel()} elements differ, greatest {(got - want).abs().max():.2e}",
        flush=True,
    )
    return differing == 0


def equal_bits(dtype: torch.dtype) -> bool:
    """Modes, tokens a row, layouts and query rows a tile against each other; all against the definition."""
    print(f"bits, {dtype}")
    contexts, tokens = [509, 300, 512, 64, 63, 777, 130, 2040], 6
    caches = Caches(1, len(contexts) * 2112, dtype)
    table, base = caches.table(len(contexts), 2048 + BLOCK), decode_base(contexts, tokens)
    query = torch.randn(len(base), HEADS, DIM, device="cuda").to(dtype)
    lengths = [tokens] * len(contexts)
    meta = metadata(table, base, lengths)
    want = attend(caches, query, meta, SERIAL)
    error = (want.float() - definition(caches, query, meta)).abs().max()
    print(f"  greatest error against the definition {error:.2e}")
    same = bool(error < (2e-2 if dtype is torch.bfloat16 else 1e-4))
    for name in ("by chunk", "by tile"):
        same &= _report(
            f"{name} = serial", attend(caches, query, metadata(table, base, lengths), MODES[name]), want
        )
    for name, mode in MODES.items():
        alone = torch.empty_like(want)
        for t in range(tokens):
            chosen = torch.arange(t, len(base), tokens, device="cuda")
            part = metadata(table, base[chosen], [1] * len(contexts))
            alone[chosen] = attend(caches, query[chosen], part, mode)
        same &= _report(f"token by token, {name} = all at once", alone, want)
    listed = metadata(table, base, lengths, listed=True)
    same &= _report("listed rows = uniform rows", attend(caches, query, listed), want)

    prompt = decode_base([0, 0], 900)
    query = torch.randn(len(prompt), HEADS, DIM, device="cuda").to(dtype)
    results = {}
    for wide in (None, 64, 128):
        with setting(WIDE_QUERY_ROWS=wide):
            meta = metadata(table[:2], prompt, [900, 900], listed=True)
            results[wide] = attend(caches, query, meta)
    picked = torch.tensor([0, 1, 63, 64, 500, 899, 900, 1700], device="cuda")
    part = select(meta, picked)
    for wide, result in results.items():
        error = (result[picked].float() - definition(caches, query[picked], part)).abs().max()
        print(f"  prefill, {wide or 'few'} query rows: greatest error against the definition {error:.2e}")
        if wide:
            _report(f"prefill, {wide} query rows = few", result, results[None])
    alone = attend(caches, query[picked], part)
    same &= _report("prefill = its tokens one by one", alone, results[None][picked])
    return same


def select(meta: AttentionMetadata, tokens: torch.Tensor) -> AttentionMetadata:
    """Some tokens of a step, each by itself."""
    base = meta.base[tokens]
    return AttentionMetadata(
        meta.rows[tokens],
        base - 1,
        torch.zeros_like(base),
        base,
        meta.block_table,
        BLOCK,
        max_slots=meta.max_slots,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--max-slots", type=int, default=8192, help="slots a row may have: sizes the grids")
    parser.add_argument("--bandwidth", type=float, default=3.0, help="TB/s of the floor")
    parser.add_argument("--warps", type=int, nargs="+", default=[gpu.NUM_WARPS])
    parser.add_argument("--tiles-in-flight", type=int, nargs="+", default=[gpu.TILES_IN_FLIGHT])
    parser.add_argument("--programs-per-sm", type=int, nargs="+", default=[gpu.PROGRAMS_PER_SM])
    parser.add_argument("--prefill", action="store_true", help="time prefill as well")
    parser.add_argument("--quick", action="store_true", help="three shapes only")
    options = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__)
    same = [equal_bits(dtype) for dtype in (torch.bfloat16, torch.float32)]
    shapes = SHAPES[:2] + SHAPES[4:5] if options.quick else SHAPES
    for warps, tiles, programs in itertools.product(
        options.warps, options.tiles_in_flight, options.programs_per_sm
    ):
        print(f"{warps} warps, {tiles} tiles in flight, {programs} programs an SM")
        with setting(NUM_WARPS=warps, TILES_IN_FLIGHT=tiles, PROGRAMS_PER_SM=programs):
            decode_times(options.max_slots, options.bandwidth, shapes)
        torch.cuda.empty_cache()
    if options.prefill:
        prefill_times()
    if not all(same):
        raise SystemExit("results differ")


if __name__ == "__main__":
    main()
