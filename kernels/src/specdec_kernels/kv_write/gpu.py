"""KV writes by Triton kernels. Their floor is one read and one write of what is stored."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from ..gpu import launch, takes
from ..rotary.gpu import can_rotate, stored, turn

_ELEMENTS = 1024
#: Slots moved at a time in the registers of a program, and elements: more go through a copy in memory.
_MOST_MOVED, _MOVED_ELEMENTS, _LEAST_WIDTH = 2048, 4096, 8
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float8_e4m3fn: tl.uint8}


@triton.jit
def store_slots(
    KEY, VALUE, KEYS, VALUES, SLOTS, key_stride, value_stride,
    KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program ``(token, block)`` of the widths of a token's keys and values."""
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    slot = tl.load(SLOTS + t)
    key = tl.load(KEY + t * key_stride + i, mask=i < KEY_WIDTH)
    value = tl.load(VALUE + t * value_stride + i, mask=i < VALUE_WIDTH)
    tl.store(KEYS + slot * KEY_WIDTH + i, stored(key, KEYS.dtype.element_ty), mask=i < KEY_WIDTH)
    tl.store(VALUES + slot * VALUE_WIDTH + i, stored(value, VALUES.dtype.element_ty), mask=i < VALUE_WIDTH)


@triton.jit(do_not_specialize=["count"])
def move_slots_of_caches(
    CACHES, SOURCE, DESTINATION, count,
    KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, DTYPE: tl.constexpr, COUNT2: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program ``(cache, block of a slot's width)``: all slots are read, then all are written."""
    which = tl.program_id(0)
    # One that is known lets 16 bytes be loaded at a time.
    width = KEY_WIDTH if KEY_WIDTH == VALUE_WIDTH else tl.where(which % 2 == 0, KEY_WIDTH, VALUE_WIDTH)
    cache = tl.multiple_of(tl.load(CACHES + which).to(tl.pointer_type(DTYPE)), 16)
    n = tl.arange(0, COUNT2)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    source = tl.load(SOURCE + n, mask=n < count, other=0)
    destination = tl.load(DESTINATION + n, mask=n < count, other=0)
    moved = ((n < count) & (source != destination))[:, None] & (i < width)[None, :]
    values = tl.load(cache + source[:, None] * width + i[None, :], mask=moved)
    tl.debug_barrier()
    tl.store(cache + destination[:, None] * width + i[None, :], values, mask=moved)


def can_write(key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor) -> bool:
    """Whether the heads of a token lie side by side, in the cache's dtype or for one of float8_e4m3fn."""
    return (
        takes(key, value, key_cache)
        and key.dtype is value.dtype
        and key_cache.dtype in (key.dtype, torch.float8_e4m3fn)
        and _whole(key)
        and _whole(value)
    )


def can_rotate_and_write(
    heads: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
) -> bool:
    """Whether keys and values are of one size, and the heads can be rotated."""
    return (
        takes(heads, key_cache, value_cache)
        and key_cache.dtype in (heads.dtype, torch.float8_e4m3fn)
        and key_cache.shape == value_cache.shape
        and can_rotate(heads, cos, sin)
    )


def can_move(caches: Sequence[tuple[torch.Tensor, torch.Tensor]], count: int) -> bool:
    """Whether all layers are of one shape, and so few slots are moved that registers hold them."""
    return bool(caches) and count <= _MOST_MOVED and all(
        takes(key, value) and key.dtype is value.dtype is caches[0][0].dtype
        and key.shape[2:] == caches[0][0].shape[2:] and value.shape[2:] == caches[0][1].shape[2:]
        for key, value in caches
    )  # fmt: skip


def rotate_and_write_kv(
    heads: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    tokens, count, dim = heads.shape
    kv_heads = key_cache.shape[2]
    query = heads.new_empty(tokens, count - 2 * kv_heads, dim)
    caches = (key_cache, value_cache, slots.contiguous())
    turn(heads, cos, sin, query, turned=count - kv_heads, caches=caches)
    return query


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    if key.shape[0] == 0:
        return
    widths = key.shape[1] * key.shape[2], value.shape[1] * value.shape[2]
    block = min(_ELEMENTS, triton.next_power_of_2(max(widths)))
    launch(
        store_slots,
        (key.shape[0], triton.cdiv(max(widths), block)),
        key,
        value,
        key_cache,
        value_cache,
        slots.contiguous(),
        key.stride(0),
        value.stride(0),
        KEY_WIDTH=widths[0],
        VALUE_WIDTH=widths[1],
        BLOCK=block,
        num_warps=4,
    )


def move_slots(
    caches: Sequence[tuple[torch.Tensor, torch.Tensor]], source: torch.Tensor, destination: torch.Tensor
) -> None:
    count = source.shape[0]
    if count == 0:
        return
    key, value = caches[0]
    widths = key.shape[2] * key.shape[3], value.shape[2] * value.shape[3]
    padded = triton.next_power_of_2(count)
    block = min(max(_LEAST_WIDTH, _MOVED_ELEMENTS // padded), triton.next_power_of_2(max(widths)))
    addresses = _addresses(tuple(cache.data_ptr() for pair in caches for cache in pair), key.device)
    launch(
        move_slots_of_caches,
        (2 * len(caches), triton.cdiv(max(widths), block)),
        addresses,
        source.contiguous(),
        destination.contiguous(),
        count,
        KEY_WIDTH=widths[0],
        VALUE_WIDTH=widths[1],
        DTYPE=_DTYPES[key.dtype],
        COUNT2=padded,
        BLOCK=block,
        num_warps=4 if padded * block <= _MOVED_ELEMENTS else 8,
    )


@functools.lru_cache(maxsize=64)
def _addresses(pointers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """``[2 L]`` int64 on the device; kept, for a captured graph reads them there."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("move_slots must have run once before it is captured in a CUDA graph")
    return torch.tensor(pointers, dtype=torch.int64, device=device)


def _whole(heads: torch.Tensor) -> bool:
    return heads.stride(2) == 1 and heads.stride(1) == heads.shape[2]
