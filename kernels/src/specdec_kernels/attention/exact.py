"""Paged attention whose bits for a token do not depend on which tokens are computed beside it.

The order of a sum shows in its bits, and libraries choose it by the shapes they are given. So each
token is computed by calls of one shape that its position alone decides: the tile of
:data:`TILE_TOKENS` positions it lies in, always whole, over keys in the order of their positions up
to the tile's end, rounded up to :data:`KEY_TILE`. Places of a tile that the step has no token for
hold zeros. In float32, whatever the dtype of the cache.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import torch

from .metadata import AttentionMetadata

#: Positions of a tile.
TILE_TOKENS = 4
#: Keys that a tile's stretch is rounded up to.
KEY_TILE = 64


@dataclasses.dataclass(slots=True, eq=False)
class Source:
    """The keys of a row, or of one node of a tree: a stretch of the cache, or gathered slots."""

    start: int
    stop: int
    slots: torch.Tensor | None

    def read(self, cache: torch.Tensor) -> torch.Tensor:
        """``[slots, heads, dim] -> [heads, length, dim]`` float32."""
        if self.slots is None:
            return cache[self.start : self.stop].float().transpose(0, 1)
        return cache.index_select(0, self.slots).float().transpose(0, 1)


@dataclasses.dataclass(slots=True, eq=False)
class Tile:
    """Keys ``first..first+length-1`` of its source for one tile of queries."""

    source: int
    first: int
    length: int
    mask: torch.Tensor  #: ``[TILE_TOKENS * group, masked]`` float32, added to the scores of the last keys


class ExactPlan:
    """Tiles of one step under one sliding window."""

    def __init__(self, meta: AttentionMetadata, window: int | None, group: int, num_slots: int) -> None:
        self._meta = meta
        self._num_slots = num_slots
        self._window = window
        self._group = group
        self._table = _host(meta.block_table)
        self._rows, self._base = _host(meta.rows), _host(meta.base)
        self._extra = None if meta.extra is None else _host(meta.extra)
        levels = 0 if self._extra is None else (self._extra >= 0).sum(1)
        self._end = self._base + levels  # keys of a token, in the order of their positions
        self._position = self._end - 1
        self._low = np.full_like(self._base, meta.first)
        if window is not None:
            np.maximum(self._low, self._position - window + 1, out=self._low)
        self.sources: list[Source] = []
        self.tiles: list[Tile] = []
        places = np.zeros(len(self._rows), np.int64)
        for begin, end in self._runs():
            source = self._source(begin, end)
            tile_of = self._position[begin:end] // TILE_TOKENS
            for tile in np.unique(tile_of):
                tokens = begin + np.flatnonzero(tile_of == tile)
                places[tokens] = len(self.tiles) * TILE_TOKENS + self._position[tokens] % TILE_TOKENS
                self.tiles.append(self._tile(source, int(tile), tokens))
        #: ``[T]`` where each token stands among the tiles' places
        self.places = self._tensor(places)
        blind = np.flatnonzero(self._low >= self._end)
        self.blind = self._tensor(blind) if len(blind) else None

    def _runs(self) -> list[tuple[int, int]]:
        """Tokens of one row that share their keys: all but the nodes of a tree, which stand alone."""
        tree: np.ndarray = np.zeros(len(self._rows), bool)
        if self._extra is not None:
            tree = np.asarray((self._extra >= 0).any(axis=1))
        alone = tree[1:] | tree[:-1] | (np.diff(self._rows) != 0)
        cuts = [0, *(np.flatnonzero(alone) + 1).tolist(), len(self._rows)]
        return list(itertools.pairwise(cuts)) if len(self._rows) else []

    def _source(self, begin: int, end: int) -> int:
        """Keys from position 0 to the last tile's end; what is beyond the row's own is masked."""
        size, row = self._meta.block_size, self._rows[begin]
        count = int(self._end[begin:end].max())
        length = _rounded((self._position[begin:end].max() // TILE_TOKENS + 1) * TILE_TOKENS, KEY_TILE)
        logical = np.arange(length)
        if self._extra is not None and (self._extra[begin] >= 0).any():
            path = np.sort(self._extra[begin][self._extra[begin] >= 0])
            logical[self._base[begin] : count] = path
        logical[count:] = 0
        physical = self._table[row, logical // size] * size + logical % size
        start = int(physical[0])
        if (np.diff(physical[:count]) == 1).all() and start + length <= self._num_slots:
            self.sources.append(Source(start, start + length, None))
        else:
            self.sources.append(Source(0, 0, self._tensor(physical)))
        return len(self.sources) - 1

    def _tile(self, source: int, tile: int, tokens: np.ndarray) -> Tile:
        end = _rounded((tile + 1) * TILE_TOKENS, KEY_TILE)
        # Under a window far keys are left out, by whole steps that the tile alone decides.
        lowest = 0 if self._window is None else tile * TILE_TOKENS - self._window + 1
        first = max(lowest, 0) // KEY_TILE * KEY_TILE
        # Without one only the last step holds keys that some place of the tile may not see.
        masked = KEY_TILE if self._window is None and not self._meta.first else end - first
        keys = np.arange(end - masked, end)
        visible = np.ones((TILE_TOKENS, masked), bool)  # places without a token: anything but NaN
        visible[self._position[tokens] % TILE_TOKENS] = (keys >= self._low[tokens, None]) & (
            keys < self._end[tokens, None]
        )
        if masked == end - first:
            visible[~visible.any(1), 0] = True
        visible = visible.repeat(self._group, axis=0)
        mask = torch.zeros(visible.shape, device=self._meta.rows.device)
        mask.masked_fill_(self._tensor(~visible), float("-inf"))
        return Tile(source, first, end - first, mask)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._meta.rows.device)


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    meta: AttentionMetadata,
    *,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    keys, values = key_cache.flatten(0, 1), value_cache.flatten(0, 1)
    heads, group = key_cache.shape[2], query.shape[1] // key_cache.shape[2]
    plan = meta.plans.get(("exact", window, group))
    if plan is None:
        plan = meta.plans["exact", window, group] = ExactPlan(meta, window, group, len(keys))
    # K KV heads of G query heads: [tiles * places, Hq, D] -> [tiles, K, places * G, D]
    tiled = query.new_zeros(len(plan.tiles) * TILE_TOKENS, *query.shape[1:], dtype=torch.float32)
    tiled[plan.places] = query.float() * scale
    tiled = (
        tiled.view(len(plan.tiles), TILE_TOKENS, heads, group, -1).transpose(1, 2).flatten(2, 3).contiguous()
    )
    read = [(source.read(keys), source.read(values)) for source in plan.sources]
    outputs = []
    for queries, tile in zip(tiled, plan.tiles, strict=True):
        key, value = (part.narrow(1, tile.first, tile.length) for part in read[tile.source])
        scores = torch.bmm(queries, key.transpose(1, 2))
        scores[:, :, -tile.mask.shape[1] :] += tile.mask
        outputs.append(torch.bmm(scores.softmax(-1), value))
    out = torch.stack(outputs).view(len(plan.tiles), heads, TILE_TOKENS, group, -1).transpose(1, 2)
    out = out.reshape(len(plan.tiles) * TILE_TOKENS, query.shape[1], -1)[plan.places].to(query.dtype)
    if plan.blind is not None:
        out.index_fill_(0, plan.blind, 0.0)
    return out


def _rounded(length: int, step: int) -> int:
    return -(-int(length) // step) * step


def _host(tensor: torch.Tensor) -> np.ndarray:
    return tensor.cpu().numpy()
