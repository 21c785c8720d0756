"""What one step's attention metadata means for the torch reference: derived once, used by every layer.

The tokens of a row are cut into tiles. A tile reads one contiguous stretch of keys, either a view
of the cache (the row's blocks lie one behind the other) or a stretch of a gathered copy, and has a
mask only if its tokens do not all see the whole stretch. Rows are never padded to each other, so
what a row computes does not depend on its neighbours.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
import torch

from .metadata import AttentionMetadata

#: Tokens of a tile up to which the query heads of a KV group are packed into one matrix.
PACKED_TOKENS = 64
#: Tokens of a larger tile: bounds its mask, and the keys beyond the causal edge that it multiplies in vain.
TILE_TOKENS = 256
#: Slots gathered at a time, and mask elements kept from layer to layer: they bound the memory of a step.
GATHER_SLOTS = 1 << 15
KEPT_MASK_ELEMENTS = 1 << 24

_FAR = np.iinfo(np.int64).max


@dataclasses.dataclass(slots=True, eq=False)
class Tile:
    """Tokens ``begin..end-1`` over keys ``start..stop-1`` of the batch's source."""

    begin: int
    end: int
    start: int
    stop: int
    low: int  #: logical slot of key ``start``
    packed: bool
    masked: bool
    mask: torch.Tensor | None = None  #: additive; None although ``masked``: built at each use


@dataclasses.dataclass(slots=True, eq=False)
class Batch:
    """Tiles that read one source: the cache itself, or a copy of the listed blocks."""

    blocks: torch.Tensor | None
    tiles: list[Tile]
    buffers: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)

    def source(self, cache: torch.Tensor, name: str) -> torch.Tensor:
        """``[slots, heads, dim]`` of a cache ``[num_blocks, block_size, heads, dim]``.

        All layers gather into one buffer of that ``name``: fresh memory for each costs page faults.
        """
        if self.blocks is None:
            return cache.flatten(0, 1)
        shape = (len(self.blocks), *cache.shape[1:])
        buffer = self.buffers.get(name)
        if buffer is None or buffer.shape != shape or buffer.dtype != cache.dtype:
            buffer = self.buffers[name] = cache.new_empty(shape)
        return torch.index_select(cache, 0, self.blocks, out=buffer).flatten(0, 1)


class AttentionPlan:
    """Tiles of one step under one sliding window, for queries of one dtype with ``group`` heads a KV head."""

    def __init__(self, meta: AttentionMetadata, window: int | None, group: int, dtype: torch.dtype) -> None:
        self._group = group
        self._dtype = dtype
        self._device = meta.rows.device
        # Token t sees the slots low[t]..base[t]-1 and extra[t], of which lowest[t] and highest[t]
        # are the first and the last.
        self._base = _host(meta.base)
        self._low = np.full_like(self._base, meta.first)
        self._extra = None if meta.extra is None or meta.extra.shape[1] == 0 else _host(meta.extra)
        if window is not None:
            np.maximum(self._low, _host(meta.positions) - (window - 1), out=self._low)
            if self._extra is not None:
                self._extra = np.where(_levels_above(self._extra) < window, self._extra, -1)
        in_range = self._low < self._base
        self._lowest = np.where(in_range, self._low, _FAR)
        self._highest = np.where(in_range, self._base - 1, -1)
        if self._extra is not None:
            self._extra = np.where(self._extra >= meta.first, self._extra, -1)
            np.minimum(self._lowest, np.where(self._extra >= 0, self._extra, _FAR).min(1), out=self._lowest)
            np.maximum(self._highest, self._extra.max(1), out=self._highest)
        self._blind = self._highest < 0
        #: ``[N]`` indices of tokens that see no slot: their output is zero
        self.blind = self._tensor(np.flatnonzero(self._blind)) if self._blind.any() else None
        self.batches = list(self._batches(meta))

    def mask(self, tile: Tile) -> torch.Tensor:
        """Additive mask of a tile: ``[n, L]``, or ``[n * group, L]`` if it is packed."""
        tokens = slice(tile.begin, tile.end)
        copies = self._group if tile.packed else 1
        length = tile.stop - tile.start
        mask = np.zeros((tile.end - tile.begin, copies, length), dtype=np.float32)
        # All tokens see the slots from the greatest low to the smallest base: nothing to do there.
        start = min(max(int(self._low[tokens].max()) - tile.low, 0), length)
        stop = max(int(self._base[tokens].min()) - tile.low, start)
        for begin, end in ((0, start), (stop, length)):
            if begin < end:
                hidden = ~self._visible(tokens, tile.low + begin, tile.low + end)
                np.copyto(mask[:, :, begin:end], -np.inf, where=hidden[:, None])
        return torch.from_numpy(mask.reshape(-1, length)).to(self._device, self._dtype)

    def _visible(self, tokens: slice, start: int, stop: int) -> np.ndarray:
        """``[n, stop - start]``: which of these slots each token sees."""
        slots = np.arange(start, stop)
        visible = (slots >= self._low[tokens, None]) & (slots < self._base[tokens, None])
        if self._extra is not None:
            extra = self._extra[tokens]
            token, entry = np.nonzero((extra >= start) & (extra < stop))
            visible[token, extra[token, entry] - start] = True
        return visible

    def _batches(self, meta: AttentionMetadata) -> Iterator[Batch]:
        in_place: list[Tile] = []
        gathered: list[Tile] = []
        blocks: list[np.ndarray] = []
        num_blocks = 0
        kept = 0
        size = meta.block_size
        table = _host(meta.block_table)
        for begin, end, row in _row_ranges(_host(meta.rows)):
            if self._blind[begin:end].all():
                continue
            first = int(self._lowest[begin:end].min()) // size
            row_blocks = table[row, first : int(self._highest[begin:end].max()) // size + 1]
            contiguous = bool((np.diff(row_blocks) == 1).all())
            if not contiguous and num_blocks and (num_blocks + len(row_blocks)) * size > GATHER_SLOTS:
                yield Batch(self._tensor(np.concatenate(blocks)), gathered)
                gathered, blocks, num_blocks = [], [], 0
            # Where the source holds the row's logical slot 0, or would.
            offset = ((int(row_blocks[0]) if contiguous else num_blocks) - first) * size
            for tile in self._tiles(begin, end, offset):
                if tile.masked:
                    elements = (
                        (tile.stop - tile.start)
                        * (tile.end - tile.begin)
                        * (self._group if tile.packed else 1)
                    )
                    if kept + elements <= KEPT_MASK_ELEMENTS:
                        tile.mask = self.mask(tile)
                        kept += elements
                (in_place if contiguous else gathered).append(tile)
            if not contiguous:
                blocks.append(row_blocks)
                num_blocks += len(row_blocks)
        if in_place:
            yield Batch(None, in_place)
        if gathered:
            yield Batch(self._tensor(np.concatenate(blocks)), gathered)

    def _tiles(self, begin: int, end: int, offset: int) -> Iterator[Tile]:
        few = end - begin <= PACKED_TOKENS
        # On a GPU always: torch 2.11's memory-efficient kernel gets the last of 64 k + 1 queries wrong
        # when the KV heads are expanded over their groups.
        packed = few or self._device.type != "cpu"
        step = end - begin if few else TILE_TOKENS
        for b in range(begin, end, step):
            e = min(b + step, end)
            if self._blind[b:e].all():
                continue
            low, stop = int(self._lowest[b:e].min()), int(self._highest[b:e].max()) + 1
            full = bool((self._low[b:e] <= low).all() and (self._base[b:e] >= stop).all())
            if not full and e - b == 1 and self._extra is not None:
                full = bool(self._visible(slice(b, e), low, stop).all())
            yield Tile(b, e, offset + low, offset + stop, low, packed, masked=not full)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def attention_plan(
    meta: AttentionMetadata, window: int | None, group: int, dtype: torch.dtype
) -> AttentionPlan:
    """The plan of ``meta``, made at its first use."""
    key = (window, group, dtype)
    plan = meta.plans.get(key)
    if plan is None:
        plan = meta.plans[key] = AttentionPlan(meta, window, group, dtype)
    return plan


def _row_ranges(rows: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """``(begin, end, row)`` of each row's tokens."""
    if not len(rows):
        return
    cuts = [0, *(np.flatnonzero(np.diff(rows)) + 1).tolist(), len(rows)]
    for begin, end in itertools.pairwise(cuts):
        yield begin, end, int(rows[begin])


def _levels_above(extra: np.ndarray) -> np.ndarray:
    """``[T, E]``: how many levels, and so positions, an entry lies above its token.

    ``extra[t]`` names the token's own scratch slot and those of its ancestors, a parent's slot
    below its child's, so the rank of a slot is its level.
    """
    return ((extra[:, None, :] > extra[:, :, None]) & (extra[:, :, None] >= 0)).sum(2)


def _host(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy()
