"""Paged attention by a Triton kernel: how a step's tokens become query tiles, and who reads which keys.

Everything is decided by what the host knows without asking the device, so that a captured graph serves
whatever its tensors hold later. No choice made here changes a bit of a result (see ``gpu_kernel``).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator

import torch
import triton

from ..gpu import launch, takes
from . import gpu_kernel
from .gpu_kernel import BY_CHUNK, BY_TILE, LISTED, SERIAL, SINGLE, UNIFORM
from .metadata import AttentionMetadata

_MOST_DIM = 256
#: Query rows (tokens times heads of a group) of a tile: the least and the most of ``mma.sync``.
_QUERY_ROWS = (16, 32)
#: Query rows of a tile of long stretches of tokens, where they are prefilled; None: as elsewhere. From 64 on
#: other instructions (wgmma) multiply.
WIDE_QUERY_ROWS: int | None = None
_WIDE_FROM = 256
#: Up to so many rows times KV heads are few.
_FEW_PAIRS = 64
#: Programs that an SM is given, for as many can keep their loads in flight on it; where that lets each of a
#: tree's tokens have a tile of its own, so many of those.
PROGRAMS_PER_SM, ALONE_PROGRAMS_PER_SM = 2, 4
#: Programs a query tile and KV head from which each takes single tiles, in contexts up to so many slots
#: (it bounds the partial results); in a step of trees.
TILE_PROGRAMS, TREE_TILE_PROGRAMS = 3, 8
_TILE_SLOTS = gpu_kernel.NEAR.value * gpu_kernel.TILE.value
NUM_WARPS = 4
#: Tiles of keys and values that a program keeps on their way, and their bytes: two programs fit on an SM.
TILES_IN_FLIGHT = 2
_BYTES_IN_FLIGHT = 96 << 10


@dataclasses.dataclass(frozen=True, eq=False)
class _Plan:
    """How one step's tokens are attended to, by all layers of one shape."""

    layout: int
    query_tiles: int
    tiles_per_row: int  #: of UNIFORM
    tiles: torch.Tensor  #: LISTED: ``[query_tiles, 3]`` int32: row, first token, tokens; SINGLE: the rows
    query_rows: int
    tokens_per_tile: int
    kept_rows: int  #: of them, those that may hold a token, as a power of two
    mode: int
    programs: int
    units: int
    partial: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  #: float32 workspaces of split modes
    arrived: torch.Tensor  #: int32 counters, zero between launches


def can_attend(query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, scale: float) -> bool:
    """Whether heads have up to 256 dimensions, groups up to 32, and the cache their dtype or float8."""
    return (
        takes(query, key_cache, value_cache)
        and key_cache.dtype is value_cache.dtype
        and key_cache.dtype in (query.dtype, torch.float8_e4m3fn)
        and max(key_cache.shape[3], value_cache.shape[3]) <= _MOST_DIM
        and query.shape[1] <= _QUERY_ROWS[-1] * key_cache.shape[2]
        and query.stride(2) == 1
        and query.stride(1) == query.shape[2]
        and key_cache.is_contiguous()
        and value_cache.is_contiguous()
        and scale > 0
    )


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    meta: AttentionMetadata,
    *,
    scale: float,
    window: int | None,
    settled: bool = False,
    mode: int | None = None,
) -> torch.Tensor:
    """As ``attention.paged_attention``; ``mode`` (SERIAL, BY_CHUNK, BY_TILE) overrides who does what.

    Tensors of ``meta`` may be changed in place between calls; a graph that captured one needs ``meta`` alive.

    A value that is not finite reaches all tokens of its row's query tile, seen or not: zero times it is NaN.
    """
    tokens, num_heads, key_dim = query.shape
    _, _, kv_heads, value_dim = value_cache.shape
    out = query.new_empty(tokens, num_heads, value_dim)
    if tokens == 0:
        return out
    group = num_heads // kv_heads
    key = ("triton", group, kv_heads, value_dim, query.dtype, mode)
    plan = meta.plans.get(key)
    early = settled or plan is not None
    if plan is None:
        plan = meta.plans[key] = _plan(meta, group, kv_heads, value_dim, query.dtype, mode)
    extra = meta.extra if meta.extra is not None and meta.extra.shape[1] else None
    columns = meta.block_table.shape[1]
    padded = tuple(max(16, triton.next_power_of_2(dim)) for dim in (key_dim, value_dim))
    tile_bytes = gpu_kernel.TILE.value * sum(padded) * query.element_size()
    launch(
        gpu_kernel.attend,
        (plan.query_tiles * kv_heads, plan.programs),
        query,
        key_cache,
        value_cache,
        out,
        meta.block_table,
        meta.base,
        meta.positions,
        meta.base if extra is None else extra,
        plan.tiles,
        *plan.partial,
        plan.arrived,
        query.stride(0),
        columns,
        meta.block_size,
        _max_slots(meta),
        meta.first,
        window or 0,
        0 if extra is None else extra.shape[1],
        meta.tokens_per_row or 0,
        plan.tiles_per_row,
        plan.units,
        int(early),
        scale * math.log2(math.e),
        LAYOUT=plan.layout,
        GROUP=group,
        KV_HEADS=kv_heads,
        DK=key_dim,
        DV=value_dim,
        DK2=padded[0],
        DV2=padded[1],
        QM=plan.query_rows,
        QR=plan.kept_rows,
        PER_TILE=plan.tokens_per_tile,
        BLOCK=0 if columns == 1 else meta.block_size,
        E=0 if extra is None else triton.next_power_of_2(extra.shape[1]),
        WINDOWED=window is not None,
        MODE=plan.mode,
        # Half of the stages bring the table's entries, the other half what they point to.
        STAGES=1 + 2 * min(TILES_IN_FLIGHT, max(1, _BYTES_IN_FLIGHT // tile_bytes)),
        num_warps=8 if plan.query_rows >= 128 or tile_bytes > _BYTES_IN_FLIGHT else NUM_WARPS,
    )
    return out


def _plan(
    meta: AttentionMetadata, group: int, kv_heads: int, value_dim: int, dtype: torch.dtype, mode: int | None
) -> _Plan:
    most = meta.tokens_per_row or (max(meta.lengths) if meta.lengths else 1)
    rows = meta.block_table.shape[0]
    query_rows = _query_rows(most * group, group, dtype, few=rows * kv_heads <= _FEW_PAIRS)
    per_tile = query_rows // group
    sms = _num_sms(meta.base.device)
    room, single = PROGRAMS_PER_SM * sms, TILE_PROGRAMS
    if meta.extra is not None and meta.extra.shape[1]:
        # Tokens of a tree that share a tile take their turns in it: where SMs are idle, each gets less.
        single = TREE_TILE_PROGRAMS
        if rows * kv_heads * most * single <= ALONE_PROGRAMS_PER_SM * sms:
            room, per_tile = ALONE_PROGRAMS_PER_SM * sms, 1
        else:
            idle = max(1, room // single // (rows * kv_heads))  # tiles that a row may have
            per_tile = min(per_tile, triton.cdiv(most, idle))
        query_rows = next((rows for rows in _QUERY_ROWS if per_tile * group <= rows), query_rows)
    tiles_per_row = 0
    tiles = meta.rows
    if meta.tokens_per_row is not None:
        layout = UNIFORM
        tiles_per_row = triton.cdiv(meta.tokens_per_row, per_tile)
        query_tiles = tiles_per_row * meta.block_table.shape[0]
    elif meta.lengths is not None:
        layout = LISTED
        listed = list(_listed(meta.lengths, per_tile))
        query_tiles = len(listed)
        tiles = torch.tensor(listed, dtype=torch.int32, device=meta.rows.device)
    else:
        layout, query_tiles = SINGLE, meta.rows.shape[0]

    pairs = query_tiles * kv_heads
    max_slots = _max_slots(meta)
    programs = max(1, room // pairs)
    if mode is None:
        mode = _division(programs, max_slots, single)
    units = 0 if mode == SERIAL else _units(max_slots, mode)
    kept_rows = min(query_rows, triton.next_power_of_2(min(per_tile, most) * group)) if units else query_rows
    partials = pairs * units * kept_rows
    workspace = functools.partial(torch.empty, dtype=torch.float32, device=meta.base.device)
    padded = max(16, triton.next_power_of_2(value_dim))
    return _Plan(
        layout=layout,
        query_tiles=query_tiles,
        tiles_per_row=tiles_per_row,
        tiles=tiles,
        query_rows=query_rows,
        tokens_per_tile=per_tile,
        kept_rows=kept_rows,
        mode=mode,
        programs=min(programs, max(units, 1)),
        units=units,
        partial=(workspace(partials * padded), workspace(partials), workspace(partials)),
        arrived=_counters(meta.base.device, pairs if units else 0),
    )


def _query_rows(most: int, group: int, dtype: torch.dtype, *, few: bool) -> int:
    """Query rows of a tile, where a row's tokens have ``most``.

    ``few``: rows and heads leave SMs idle, so that two small tiles are done sooner than a large one.
    """
    if group <= _QUERY_ROWS[0] and (dtype is torch.float32 or (few and most <= _QUERY_ROWS[-1])):
        return _QUERY_ROWS[0]  # in float32 no tensor core multiplies: more do not fit in the registers
    if WIDE_QUERY_ROWS is not None and most >= _WIDE_FROM:
        return WIDE_QUERY_ROWS
    return next((rows for rows in _QUERY_ROWS if most <= rows), _QUERY_ROWS[-1])


def _listed(lengths: tuple[int, ...], per_tile: int) -> Iterator[tuple[int, int, int]]:
    """Row, first token and number of tokens of each tile; a row's last first, for those see most."""
    begin = 0
    for row, length in enumerate(lengths):
        for first in reversed(range(0, length, per_tile)):
            yield row, begin + first, min(per_tile, length - first)
        begin += length


def _division(programs: int, max_slots: int, single: int) -> int:
    """Who does what, where each query tile and KV head may have so many programs.

    ``single``: from how many on each takes a tile at a time.
    """
    if programs >= single and max_slots <= _TILE_SLOTS:
        return BY_TILE
    return BY_CHUNK if programs > 1 and _units(max_slots, BY_CHUNK) > 1 else SERIAL


def _units(max_slots: int, mode: int) -> int:
    """Tiles, or chunks, of a row of ``max_slots``."""
    tiles = max(1, triton.cdiv(max_slots, gpu_kernel.TILE.value))
    if mode == BY_TILE:
        if max_slots > _TILE_SLOTS:
            raise ValueError(f"single tiles are for up to {_TILE_SLOTS} slots, not {max_slots}")
        return tiles
    near = gpu_kernel.NEAR.value
    return triton.cdiv(min(tiles, near), gpu_kernel.CHUNK.value) + triton.cdiv(
        max(tiles - near, 0), gpu_kernel.FAR_CHUNK.value
    )


def _max_slots(meta: AttentionMetadata) -> int:
    return meta.max_slots or meta.block_table.shape[1] * meta.block_size


@functools.cache
def _num_sms(device: torch.device) -> int:
    return 2 if device.type != "cuda" else torch.cuda.get_device_properties(device).multi_processor_count


def _counters(device: torch.device, count: int) -> torch.Tensor:
    """``[count]`` int32 at least, zero between launches; they outlive all graphs."""
    return _kept_counters(device, triton.next_power_of_2(max(count, 1024)))


@functools.cache
def _kept_counters(device: torch.device, count: int) -> torch.Tensor:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("attention must have run once before it is captured in a CUDA graph")
    return torch.zeros(count, dtype=torch.int32, device=device)
