"""Find the tiles of the fused products on this card, and write them as ``projection/tuned.json`` has them.

    python benchmarks/gpu/tune.py --out tuned.json                the shape of Llama-3.1-8B, bf16, all classes
    python benchmarks/gpu/tune.py --config DIR/config.json --tokens 16,64 --merge tuned.json --out tuned.json
    python benchmarks/gpu/tune.py --config eagle3-8b-shape/config.json ...         an EAGLE-3 head's
    python benchmarks/gpu/tune.py --refine --merge tuned.json --out tuned.json     from the tiles in use on
    python benchmarks/gpu/tune.py --ranks 2 ...                                    of one rank of two
    python benchmarks/gpu/tune.py --weights fp8,int4-128 --tokens 16,32 --quick ...       of quantised weights

Candidates are compiled in processes before CUDA is started, then timed in a CUDA graph of several layers
with attention and the output projection: alone, a product hides what it costs its neighbours. One
product's tile is changed at a time. Every candidate's output must equal the first one's to the bit.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import multiprocessing
import os
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from candidates import SHARED, candidates, candidates_of_words, refinements
from specdec_kernels.attention import AttentionMetadata
from specdec_kernels.attention import gpu as attention
from specdec_kernels.projection import Stream, gpu, tiles
from specdec_kernels.projection.tiles import CLASSES, Tile, by_rule, by_rule_of_words
from specdec_kernels.quantized import BLOCK as WORD_BLOCK
from specdec_kernels.quantized import QuantizedMatrix, WordMatrix, words_of

HERE = Path(__file__).parent
#: What the last class is timed with.
MANY = 4096
#: More rows than this hardly ever go through the output projection.
MOST_LOGITS = 256
#: Tokens in front of those computed, and slots of a block of the cache.
CONTEXT, BLOCK = 512, 16
PREFETCHES = (0, 1024, 2048, 4096, 8192)
#: A candidate must be better by this part.
MARGIN = 0.0007


@dataclass(frozen=True)
class Shape:
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    dim: int
    vocabulary: int
    head_norm: bool
    joined: int = 0  #: hidden states that a layer takes in beside each token's embedding; 0: no draft head
    taps: int = 0  #: hidden states of the target that those are made of
    label: str = ""  #: of the layers' weights where they stay quantised: ``int4-128``, ``fp8``, ``fp8-128``

    @staticmethod
    def read(path: Path) -> Shape:
        config = json.loads(path.read_text())
        heads = config["num_attention_heads"]
        return Shape(
            config["hidden_size"],
            config["intermediate_size"],
            heads,
            config.get("num_key_value_heads") or heads,
            config.get("head_dim") or config["hidden_size"] // heads,
            config["vocab_size"],
            config.get("model_type") == "qwen3",
        ).as_head(config)

    def of_a_rank(self, ranks: int) -> Shape:
        """What one of so many ranks has of it."""
        parts = {
            "inner": self.inner,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "vocabulary": self.vocabulary,
        }
        return replace(self, **{name: -(-size // ranks) for name, size in parts.items()})

    def words(self, name: str) -> WordMatrix | None:
        """Weights of a product as they are stored, without memory; None: they are not quantised."""
        if not self.label_of(name):
            return None
        return a_matrix(self.label, *self.products[name][1:], "meta")

    def parts(self, name: str) -> int:
        """Parts of a product's inputs that are summed on their own."""
        words = self.words(name)
        return 1 if words is None else tiles.parts_of(words)

    def label_of(self, name: str) -> str:
        return "" if name == "logits" else self.label

    def as_head(self, config: dict) -> Shape:
        """Of an EAGLE-3 head, if that is what has a vocabulary of its own: a layer on two norms."""
        if (drafted := config.get("draft_vocab_size")) is None:
            return self
        return replace(self, vocabulary=drafted, joined=1, taps=3)

    @property
    def in_a_layer(self) -> list[str]:
        """Products that each layer has weights of its own for: of a head, all."""
        return [name for name in self.products if self.joined or name != "logits"]

    @property
    def products(self) -> dict[str, tuple[str, int, int]]:
        """Name -> kind, outputs, inputs. Those that weigh most come first."""
        hidden, attended = self.hidden, self.heads * self.dim
        return {
            "gate_up": ("gate_up", 2 * self.inner, hidden),
            "down": ("add", hidden, self.inner),
            "qkv": ("qkv", (self.heads + 2 * self.kv_heads) * self.dim, (1 + self.joined) * hidden),
            "o": ("add", hidden, attended),
            "logits": ("product", self.vocabulary, hidden),
            **({"fc": ("product", hidden, self.taps * hidden)} if self.taps else {}),
        }


def a_matrix(label: str, outputs: int, inputs: int, device: str) -> WordMatrix:
    """Random weights that stay quantised; of the device ``meta`` without memory."""
    kind, _, size = label.partition("-")
    groups = inputs // int(size) if size else 1
    if device != "meta":
        generator = torch.Generator(device).manual_seed(0)
        std = inputs**-0.5
        return words_of(QuantizedMatrix.random(kind, outputs, inputs, groups, std=std, generator=generator))
    width = -(-inputs // WORD_BLOCK) * WORD_BLOCK // (4 if kind == "int4" else 2)
    return WordMatrix(
        kind=kind,
        words=torch.empty(outputs, width, dtype=torch.int16, device=device),
        params=torch.empty(
            groups, outputs, dtype=torch.int32 if kind == "int4" else torch.float32, device=device
        ),
        inputs=inputs,
    )


@dataclass(frozen=True, eq=False)
class Inputs:
    ids: torch.Tensor
    meta: AttentionMetadata
    caches: list[list[torch.Tensor]]


class Layers:
    """Layers with weights of their own, and the output projection."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: str, count: int) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self.weights = [
            {name: self._weight(*shape.products[name][1:], shape.label_of(name)) for name in shape.in_a_layer}
            for _ in range(count)
        ]
        self.logits = self._weight(shape.vocabulary, shape.hidden)
        self.tapped = self._weight(2 * MANY, shape.taps * shape.hidden) if shape.taps else None
        self.gain = torch.ones(shape.hidden, dtype=dtype, device=device)
        self.head_gain = torch.ones(shape.dim, dtype=dtype, device=device) if shape.head_norm else None
        self.table = torch.full((CONTEXT + 8, shape.dim // 2), 0.5**0.5, device=device)

    def _weight(self, outputs: int, inputs: int, label: str = "") -> torch.Tensor | WordMatrix:
        if label:
            return a_matrix(label, outputs, inputs, self.device)
        weight = torch.empty(outputs, inputs, dtype=self.dtype, device=self.device)
        return weight if self.device == "meta" else weight.normal_(0, inputs**-0.5)

    def inputs(self, tokens: int, per_row: int | None = None, max_slots: int = CONTEXT + BLOCK) -> Inputs:
        """Rows of some tokens behind :data:`CONTEXT` others; of many tokens no attention is computed."""
        shape = self.shape
        if per_row is None:
            per_row = max(count for count in ((1,) if tokens <= 32 else (8, 6, 1)) if tokens % count == 0)
        rows = tokens // per_row
        blocks = -(-max_slots // BLOCK)
        index = torch.arange(tokens, device=self.device)
        row, position = index // per_row, CONTEXT + index % per_row
        table = 1 + torch.arange(rows * blocks, device=self.device).view(rows, blocks)
        slots = (1 + row * blocks) * BLOCK + position
        meta = AttentionMetadata(
            *(row, position, slots, position + 1, table, BLOCK),
            tokens_per_row=per_row,
            max_slots=max_slots,
        )
        cache = (1 + rows * blocks, BLOCK, shape.kv_heads, shape.dim)
        caches = []
        for _ in self.weights if tokens <= MOST_LOGITS else self.weights[:1]:
            pair = [torch.empty(cache, dtype=self.dtype, device=self.device) for _ in "kv"]
            caches.append(pair if self.device == "meta" else [part.normal_() for part in pair])
        return Inputs(index * 37 % shape.vocabulary, meta, caches)

    def run(self, inputs: Inputs) -> torch.Tensor:
        """Logits."""
        if self.shape.joined:
            return self._run_heads(inputs)
        stream = gpu.embed(inputs.ids, self.logits, self.gain)
        for index, layer in enumerate(self.weights):
            stream = self._layer(stream, layer, inputs, *inputs.caches[index % len(inputs.caches)])
        hidden = gpu.normalize(stream, self.gain, 1e-5)
        return gpu.product(hidden[:MOST_LOGITS], self.logits, None)

    def _run_heads(self, inputs: Inputs) -> torch.Tensor:
        """One head behind the other, as the levels of a draft: logits of the last."""
        assert self.tapped is not None
        tapped, gain = self.tapped[: len(inputs.ids)], self.gain
        for head, cache in zip(self.weights, itertools.cycle(inputs.caches), strict=False):
            feature = gpu.product(tapped, head["fc"], None)
            joined = gpu.join(inputs.ids, self.logits, feature, table_gain=gain, feature_gain=gain, eps=1e-5)
            stream = self._layer(Stream(feature, joined, None), head, inputs, *cache)
            logits = gpu.product(gpu.normalize(stream, gain, 1e-5)[:MOST_LOGITS], head["logits"], None)
            tapped = torch.cat((tapped[:, self.shape.hidden :], stream.residual), 1)
        return logits

    def _layer(
        self,
        stream: Stream,
        layer: dict[str, torch.Tensor],
        inputs: Inputs,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> Stream:
        attended = gpu.project_qkv(
            stream,
            layer["qkv"],
            None,
            eps=1e-5,
            cos=self.table,
            sin=self.table,
            positions=inputs.meta.positions,
            write_slots=inputs.meta.write_slots,
            key_cache=keys,
            value_cache=values,
            query_gain=self.head_gain,
            key_gain=self.head_gain,
            rotate=True,
        )
        if len(inputs.ids) <= MOST_LOGITS:
            scale = self.shape.dim**-0.5
            attended = attention.paged_attention(
                attended, keys, values, inputs.meta, scale=scale, window=None
            )
        stream = gpu.add_product(attended.flatten(1), layer["o"], None, stream, self.gain)
        gated = gpu.project_gate_up(stream, layer["gate_up"], None, eps=1e-5, activation="silu")
        return gpu.add_product(gated, layer["down"], None, stream, self.gain)


@dataclass(frozen=True)
class How:
    """What is looked for: fewer candidates, other ways to load the tiles in use, some products alone."""

    quick: bool
    refine: bool
    only: frozenset[str]  #: empty: all
    logits: bool = True  #: the output projection too

    def tunes(self, name: str, bound: int) -> bool:
        if name == "logits" and not (self.logits and bound <= MOST_LOGITS):
            return False
        return not self.only or name in self.only


def start(shape: Shape, dtype: torch.dtype, bound: int, how: How) -> dict[str, Tile]:
    """The tiles that others are compared with: by rule, or those in use."""
    found = {}
    for name, (kind, outputs, inputs) in shape.products.items():
        if how.refine or not how.tunes(name, bound):
            label, parts = shape.label_of(name), shape.parts(name)
            used = _CHOOSE(kind, dtype, "sm_90", outputs, inputs, bound, label, parts)
            found[name] = cut(shape, name, used, dtype)
        elif shape.label_of(name):
            found[name] = cut(shape, name, by_rule_of_words(kind, dtype, bound, shape.parts(name)), dtype)
        else:
            found[name] = by_rule(kind, dtype, outputs, inputs, bound)
    return found


def cut(shape: Shape, name: str, tile: Tile, dtype: torch.dtype) -> Tile:
    """``tile`` with the stages that fit."""
    return tiles.fitted(tile, dtype.itemsize, SHARED, words=shape.words(name))


def plan(shape: Shape, dtype: torch.dtype, bound: int, how: How) -> dict[str, list[Tile]]:
    """Product -> its candidates, those alike once they are cut to what fits left out."""
    found: dict[str, list[Tile]] = {}
    quick, refine = how.quick, how.refine
    begun = start(shape, dtype, bound, how)
    for name, (kind, _, inputs) in shape.products.items():
        if not how.tunes(name, bound):
            continue
        if shape.label_of(name):
            early = [replace(begun[name], early=True)]
            tried = early if refine else candidates_of_words(bound, shape.parts(name), quick=quick)
            tried = [cut(shape, name, tile, dtype) for tile in tried]
            tried = [tile for tile in tried if tile.stages > 1]  # of one, nothing is loaded ahead
        else:
            tried = refinements(begun[name], bound) if refine else candidates(kind, bound, quick=quick)
        tried = [tile for tile in tried if tile.inputs <= max(16, inputs)]
        if kind == "product":  # nothing is added to it
            tried = [tile for tile in tried if not tile.early]
        fitted = [tile for tile in tried if cut(shape, name, tile, dtype) == tile]
        own = begun[name] if refine else replace(begun[name], prefetch=0)
        found[name] = [tile for tile in dict.fromkeys(fitted) if tile != own]
    return found


_SMS = 132
_CHOOSE = tiles.choose


def use(shape: Shape, chosen: dict[str, Tile]) -> None:
    """Make the products take these tiles."""
    by_dims = {shape.products[name]: tile for name, tile in chosen.items()}

    def choose(kind: str, _dtype: object, _device: object, outputs: int, inputs: int, *_how: object) -> Tile:
        return by_dims[kind, outputs, inputs]

    tiles.choose = choose  # type: ignore[assignment]


def without_a_card() -> None:
    """Cut as on an H100, which is not asked: CUDA must not start in a process that only compiles."""
    tiles.family = lambda _: ("sm_90", SHARED)  # type: ignore[assignment]
    attention._num_sms = lambda _: _SMS  # type: ignore[assignment]


def compile_ahead(task: tuple[Shape, torch.dtype, int, dict[str, Tile]]) -> str:
    """In a process of its own: kernels into Triton's cache; what went wrong, or nothing."""
    from specdec_kernels.gpu.compiling import compiling_only

    shape, dtype, bound, chosen = task
    without_a_card()
    use(shape, chosen)
    try:
        with compiling_only(inspect=False):
            layers = Layers(shape, dtype, "meta", 1)
            layers.run(layers.inputs(min(bound, MANY)))
    except Exception as error:  # a candidate less
        return f"{chosen}: {error!r}"[:300]
    return ""


def compile_all(shapes: list[Shape], dtype: torch.dtype, bounds: list[int], how: How) -> None:
    tasks = []
    for shape, bound in itertools.product(shapes, bounds):
        base = start(shape, dtype, bound, how)
        tasks.append((shape, dtype, bound, base))
        tried = plan(shape, dtype, bound, how)
        for index in range(max(map(len, tried.values()))):
            changed = {name: found[index] for name, found in tried.items() if index < len(found)}
            tasks.append((shape, dtype, bound, {**base, **changed}))
    in_processes(compile_ahead, tasks, "sets of tiles")


def in_processes(compile_one: Callable[[Any], str], tasks: Sequence[Any], what: str) -> None:
    """Compile all ``tasks`` before CUDA is started; ``compile_one`` gives what went wrong, or nothing."""
    began = time.perf_counter()
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        for error in filter(None, pool.imap_unordered(compile_one, tasks, 1)):
            print("does not compile:", error, flush=True)
    print(f"{len(tasks)} {what} compiled in {time.perf_counter() - began:.0f} s", flush=True)


class Timer:
    """Times the layers with given tiles, and holds their output to the first one's bits."""

    def __init__(self, layers: Layers, tokens: int, *, replays: int) -> None:
        self.layers, self.inputs, self.replays = layers, layers.inputs(tokens), replays
        self.expected: torch.Tensor | None = None

    def __call__(self, chosen: dict[str, Tile]) -> float:
        """Milliseconds; infinite where the kernels do not run, or not to the same bits."""
        use(self.layers.shape, chosen)
        try:
            output = self.layers.run(self.inputs)
            if self.expected is None:
                self.expected = output.clone()
            elif not torch.equal(output, self.expected):
                wrong = int((output != self.expected).sum())
                print(f"  OTHER BITS in {wrong} of {output.numel()} logits: {chosen}", flush=True)
                return float("inf")
            return self.measure(lambda: self.layers.run(self.inputs))
        except RuntimeError as error:
            if "illegal" in str(error):
                raise
            print("  does not run:", repr(error)[:200], flush=True)
            return float("inf")

    def measure(self, run: Callable[[], object]) -> float:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        for _ in range(2):
            graph.replay()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(self.replays)]
        for before, after in events:
            before.record()
            graph.replay()
            after.record()
        torch.cuda.synchronize()
        return statistics.median(before.elapsed_time(after) for before, after in events)


def tune(
    layers: Layers, bound: int, how: How, *, deadline: float, better: Callable[[dict[str, Tile]], None]
) -> tuple[dict[str, Tile], float, float]:
    """The best tiles of a class, milliseconds of those it begins with and of them.

    ``better`` gets the best ones so far: a run that is cut leaves what it has found.
    """
    shape, dtype = layers.shape, layers.dtype
    timer = Timer(layers, min(bound, MANY), replays=7 if how.quick else 11)
    chosen = start(shape, dtype, bound, how)
    timer(chosen)
    first = best = timer(chosen)

    def attempt(name: str, tile: Tile) -> None:
        nonlocal best, chosen
        if tile != chosen[name] and time.perf_counter() < deadline:
            taken = timer({**chosen, name: tile})
            if how.refine:
                print(f"    {name} {tile.values}: {taken:.4f} beside {best:.4f}", flush=True)
            if taken < best * (1 - MARGIN):
                best, chosen = taken, {**chosen, name: tile}
                better(chosen)

    for name, found in plan(shape, dtype, bound, how).items():
        ahead = chosen[name].prefetch
        for tile in found:
            attempt(name, replace(tile, prefetch=ahead))
        if bound <= 256 and not how.refine:
            for amount in PREFETCHES:
                if shape.label_of(name):  # rows are of fewer bytes
                    amount //= 2
                attempt(name, replace(chosen[name], prefetch=amount))
            if how.only and shape.products[name][0] != "product":
                attempt(name, replace(chosen[name], early=True))
    return chosen, first, best


def rate(layers: Layers, bound: int, milliseconds: float) -> str:
    shape, tokens = layers.shape, min(bound, MANY)
    sizes = [shape.products[name][1:] for name in shape.in_a_layer]
    a_layer = sum(outputs * inputs for outputs, inputs in sizes)
    logits = 0 if shape.joined else shape.vocabulary * shape.hidden
    count = len(layers.weights)
    held = sum(weight.num_bytes if isinstance(weight, WordMatrix) else weight.nbytes
               for layer in layers.weights for weight in layer.values())  # fmt: skip
    size = held + logits * layers.dtype.itemsize
    work = 2 * (a_layer * count * tokens + logits * min(tokens, MOST_LOGITS))
    seconds = milliseconds / 1e3
    return f"{size / seconds / 1e12:.2f} TB/s of weights, {work / seconds / 1e12:.0f} TFLOP/s"


def written(table: dict[str, Any]) -> str:
    """JSON with a tile a line."""

    def joined(tile: re.Match[str]) -> str:
        return json.dumps(json.loads(tile.group()))

    return re.sub(r"\[[^\[\]]*\]", joined, json.dumps(table, indent=1)) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--config", type=Path, default=HERE / "llama-8b-shape/config.json")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--tokens", help="classes, separated by commas; all unless given")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--merge", type=Path, help="a file whose other entries are kept")
    parser.add_argument("--ranks", type=int, default=1, help="the model is shared out among so many GPUs")
    parser.add_argument("--budget", type=float, default=150, help="seconds")
    parser.add_argument("--refine", action="store_true", help="from the tiles in use: how they load")
    parser.add_argument(
        "--weights", default="", help="some of int4-128, fp8, fp8-128, int8: the layers' weights, alone"
    )
    parser.add_argument("--only", help="products, separated by commas; the others keep their tiles")
    parser.add_argument("--quick", action="store_true", help="fewer candidates")
    arguments = parser.parse_args()
    began = time.perf_counter()
    dtype = getattr(torch, arguments.dtype)
    read = Shape.read(arguments.config).of_a_rank(arguments.ranks)
    shapes = [replace(read, label=label) for label in arguments.weights.split(",")]
    wanted = [int(part) for part in arguments.tokens.split(",")] if arguments.tokens else list(CLASSES)
    bounds = list(dict.fromkeys(tiles.token_class(tokens) for tokens in wanted))
    only = frozenset(arguments.only.split(",") if arguments.only else ())
    if unknown := only - read.products.keys():
        parser.error(f"--only {', '.join(sorted(unknown))}: there are {', '.join(read.products)}")
    # the output projection is not quantised: it has its tiles
    how = How(arguments.quick, arguments.refine, only, logits=not arguments.weights)
    compile_all(shapes, dtype, bounds, how)

    name, _ = tiles.family(0)
    table = json.loads(arguments.merge.read_text()) if arguments.merge else {}
    of = table.setdefault(name, {})

    def keep(shape: Shape, bound: int, chosen: dict[str, Tile]) -> None:
        for product, tile in chosen.items():
            if how.tunes(product, bound):
                kind, outputs, inputs = shape.products[product]
                found = of.setdefault(f"{arguments.dtype} {shape.label_of(product)}".strip(), {})
                by_shape = found.setdefault(kind, {}).setdefault(f"{outputs}x{inputs}", {})
                by_shape[str(bound)] = tile.values
        arguments.out.write_text(written(table))

    for done, shape in enumerate(shapes):
        layers = Layers(shape, dtype, "cuda", _count(shape, dtype))
        device = torch.cuda.get_device_name()
        weights = shape.label or dtype
        print(f"{device}, {arguments.config}, {weights}, {len(layers.weights)} layers", flush=True)
        for index, bound in enumerate(bounds):
            left = began + arguments.budget - time.perf_counter()
            rest = (len(shapes) - done) * len(bounds) - index
            chosen, first, best = tune(
                layers,
                bound,
                how,
                deadline=time.perf_counter() + left / rest,
                better=functools.partial(keep, shape, bound),
            )
            print(
                f"up to {bound} tokens: {first:.4f} -> {best:.4f} ms; {rate(layers, bound, best)}", flush=True
            )
            for product, tile in chosen.items():
                if how.tunes(product, bound):
                    print(f"    {product}: {tile}", flush=True)
            keep(shape, bound, chosen)
        del layers
        torch.cuda.empty_cache()
    print(f"{time.perf_counter() - began:.0f} s in all")


def _count(shape: Shape, dtype: torch.dtype) -> int:
    """As many layers as no cache holds."""
    bits = {"int4": 4, "int8": 8, "fp8": 8}.get(shape.label.partition("-")[0], 8 * dtype.itemsize)
    sizes = [shape.products[name][1:] for name in shape.in_a_layer]
    a_layer = sum(outputs * inputs for outputs, inputs in sizes) * bits // 8
    return min(32, max(4, round(2.5e9 / a_layer)))


if __name__ == "__main__":
    main()
