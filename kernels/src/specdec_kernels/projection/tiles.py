"""Which tile a product of a given shape goes by: measured ones from ``tuned.json``, else by rule."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

import torch

from ..quantized import BLOCK, WordMatrix
from .stream import COLUMNS

#: Outputs from which tiles of 128 rows are enough for all SMs; a matrix of words with fewer is in parts.
_MANY_OUTPUTS, _PARTS = 16384, 4
#: Most rows and tokens of a tile in which the parts stand beside each other.
_TALLEST, _WIDEST = 256, 128
#: Most products of a part in one warp's registers.
_IN_A_WARP = 64 * 32
#: Products of at most so many tokens share a tile; those of more take the last one's.
CLASSES = (16, 32, 48, 64, 96, 128, 192, 256, 512, 1 << 30)


@dataclass(frozen=True)
class Tile:
    """How a product is cut.

    Attributes:
        rows: of the weights in a tile, 64 or 128.
        tokens: ``(first, second)``, two powers of two; the second may be 0.
        inputs: summed in a step of the loop.
        stages: steps in flight.
        warps: of a program.
        prefetch: bytes of each weight row that are brought into L2 before the kernel ahead has ended; where
            parts of it are read at a time, so many of all of them.
        early: what is added to or scales the products is asked for before the loop, not behind it.
        boxes: weights and tokens are loaded by tensor descriptors (TMA) where their shapes allow it.
        batch: parts of the inputs are multiplied as a batch, a warp each (:func:`beside`).

    None of them changes a bit of a product.
    """

    rows: int
    tokens: tuple[int, int]
    inputs: int
    stages: int
    warps: int
    prefetch: int = 0
    early: bool = False
    boxes: bool = False
    batch: bool = False

    @staticmethod
    def parse(values: Any) -> Tile:
        """Of :attr:`values`, where what is off by default may be left out."""
        rows, first, second, inputs, stages, warps, prefetch, *how = values
        return Tile(rows, (first, second), inputs, stages, warps, prefetch, *map(bool, how))

    @property
    def values(self) -> list[int]:
        """Rows, both parts of the tokens, inputs, stages, warps, prefetch; the flags if one is on."""
        how = [int(self.early), int(self.boxes), int(self.batch)]
        while how and not how[-1]:
            how.pop()
        return [self.rows, *self.tokens, self.inputs, self.stages, self.warps, self.prefetch, *how]


def token_class(tokens: int) -> int:
    """The least of :data:`CLASSES` that holds ``tokens``."""
    return next(bound for bound in CLASSES if tokens <= bound)


@functools.lru_cache(maxsize=4096)
def choose(
    kind: str,
    dtype: torch.dtype,
    device: str,
    outputs: int,
    inputs: int,
    bound: int,
    label: str = "",
    parts: int = 1,
) -> Tile:
    """The tile of ``kind`` (``product``, ``add``, ``gate_up``, ``qkv``) for weights ``[outputs, inputs]``.

    Args:
        device: the family, as :func:`family` tells it.
        bound: a class of tokens.
        label: of weights that stay quantised (:attr:`WordMatrix.label`); "": they are of ``dtype``.
        parts: :func:`parts_of` those.
    """
    name = str(dtype).removeprefix("torch.") + (f" {label}" if label else "")
    found = tuned().get(device, {}).get(name, {}).get(kind, {})
    by_shape = found.get(f"{outputs}x{inputs}", {})
    if (values := by_shape.get(str(bound))) is not None:
        return Tile.parse(values)
    if label:
        return by_rule_of_words(kind, dtype, bound, parts)
    return by_rule(kind, dtype, outputs, inputs, bound)


def by_rule(kind: str, dtype: torch.dtype, outputs: int, inputs: int, bound: int) -> Tile:
    """A good tile for any shape: what won on Hopper cards for an 8B model's shape, whole and halved."""
    widest = max(16, 1 << (inputs - 1).bit_length())
    if dtype is torch.float32:  # by fused multiply-adds, in registers
        return Tile(64, (min(bound, 64) if bound in (16, 32) else 64, 0), min(32, widest), 2, 4)
    if bound <= 64:
        rows = 128 if kind == "gate_up" and bound > 16 and outputs >= _MANY_OUTPUTS else 64
        ahead = {"qkv": 4096, "gate_up": 1024, "add": 2048 if inputs > 8192 else 1024, "product": 0}[kind]
        stages = 4 if rows == 128 else 6 if bound > 32 or kind == "add" else 8
        tokens = (32, 16) if bound == 48 else (bound, 0)
        return Tile(rows, tokens, min(128, widest), stages, 4, ahead)
    if bound <= 256:
        # weights are still read from memory once, but a tile's inputs must come from L2 at the pace of
        # the tensor cores: as many stages as fit
        wide = kind in ("gate_up", "product")
        tokens = {96: (64, 32), 192: (128, 64) if wide else (64, 32)}.get(bound, (128, 0))
        return Tile(128 if wide else 64, tokens, min(64, widest), 6, 8 if wide else 4, 1024)
    # an addition's epilogue spills over 256 tokens at a time
    tokens = {"qkv": (128, 0), "add": (128, 128)}.get(kind, (256, 0))
    return Tile(128, tokens, min(64, widest), 3, 8)


def parts_of(weight: torch.Tensor | WordMatrix) -> int:
    """Parts of the inputs that are summed on their own: a power of two that the shape alone decides.

    Decoding takes more warps than reading does: where there are few outputs, each gets several.
    """
    if isinstance(weight, torch.Tensor):
        return 1
    outputs, inputs = weight.shape
    blocks = -(-inputs // BLOCK)
    parts = 1 if outputs > _MANY_OUTPUTS else _PARTS
    while blocks % parts:
        parts //= 2
    return parts


def columns_of(weight: torch.Tensor | WordMatrix) -> int:
    """Columns of a partial sum of squares behind a product."""
    return COLUMNS if parts_of(weight) == 1 else COLUMNS // 2


def beside(tile: Tile, parts: int) -> str:
    """How a tile is to hold all parts of the inputs at a time: as a ``batch`` or as its ``rows``; "": one
    behind the other.
    """
    rows, (tokens, more) = tile.rows, tile.tokens
    if parts == 1 or more:
        return ""
    if tile.batch and rows * tokens <= _IN_A_WARP:
        return "batch"
    return "rows" if rows * parts <= _TALLEST and tokens * parts <= _WIDEST else ""


def by_rule_of_words(kind: str, dtype: torch.dtype, bound: int, parts: int) -> Tile:
    """The same for weights that stay quantised, whose loop goes in steps of a block of them."""
    if dtype is torch.float32:
        return Tile(32 if parts > 1 else 64, (16, 0), BLOCK, 2, 4)
    if bound <= 64 and parts > 1:
        return Tile(32, (min(bound, 32), 0), BLOCK, 5, 8, 1024 if kind == "qkv" else 512)
    if bound <= 64:
        rows = 128 if kind == "gate_up" else 64
        return Tile(
            rows, (32, 16) if bound == 48 else (bound, 0), BLOCK, 6, 4, 512 if kind == "gate_up" else 0
        )
    # decoding takes its time anew for each tile of tokens, and registers beside those of the sums
    return Tile(128, (64, 0), BLOCK, 3, 8)


def fitted(tile: Tile, size: int, shared: int, *, rows: int = 1, words: WordMatrix | None = None) -> Tile:
    """``tile`` with a multiple of ``rows`` rows, and no more stages than fit into shared memory.

    Args:
        size: bytes of an element.
        shared: bytes of shared memory that a program may have.
        rows: a power of two.
        words: the weights, if they stay quantised.
    """
    if words is None:
        return _fitted(tile, size, shared, rows, 1, 8 * size, 0)
    parts = parts_of(words)
    length = -(-words.inputs // BLOCK) * BLOCK // parts
    return _fitted(tile, size, shared, rows, parts, words.bits, length)


@functools.lru_cache(maxsize=4096)
def _fitted(tile: Tile, size: int, shared: int, rows: int, parts: int, bits: int, length: int) -> Tile:
    """``length``: inputs of a part of words, 0 of other weights."""
    if length % tile.inputs:  # a turn is of one part
        tile = replace(tile, inputs=BLOCK)
    wide = max(tile.rows, rows)
    warps = min(8, tile.warps * wide // tile.rows)
    tall, tokens = wide, sum(tile.tokens)
    how = beside(replace(tile, rows=wide), parts)
    if how == "batch":  # two warps of a part would both compute all of it
        warps = min(warps, parts)
    if how:
        tall, tokens = tall * parts, tokens * parts
    stage = (tall * bits // 8 + tokens * size) * tile.inputs
    if length:  # parameters of four groups in a block at the most, in two layouts
        stage += 4 * 2 * 4 * tall * (tile.inputs // BLOCK)
    # some is kept for the epilogue's exchanges, which the compiler lays over the stages if it can
    stages = max(1, min(tile.stages, (shared - 1024) // stage))
    return replace(tile, rows=wide, stages=stages, warps=warps)


@functools.cache
def tuned() -> dict[str, Any]:
    """What the tuner found: family, dtype, kind, shape, class of tokens -> the values of a :class:`Tile`."""
    return json.loads(resources.files(__package__).joinpath("tuned.json").read_text())


@functools.cache
def family(index: int | None) -> tuple[str, int]:
    """Cards that take the same tiles, by compute capability, and the shared memory of a program there.

    As on Hopper where there is no card: kernels are compiled for one.
    """
    if not torch.cuda.is_available():
        return "sm_90", 232448
    properties = torch.cuda.get_device_properties(index)
    return f"sm_{properties.major}{properties.minor}", properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
