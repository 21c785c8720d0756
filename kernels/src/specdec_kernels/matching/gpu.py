"""Prompt lookup in Triton: every place of the texts is compared with their ends, then the best copied.

Bound by reading the texts, 4 bytes a token; in a step they come out of the L2 cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from ..gpu import launch

_BLOCK = 2048


@triton.jit
def _find_kernel(
    HISTORY,
    LENGTHS,
    LIMITS,
    FOUND,
    stride,
    SHORTEST: tl.constexpr,
    LONGEST: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The best match of a block of places: its window above, the place below, 0 if there is none."""
    row = tl.program_id(1)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    HISTORY += row.to(tl.int64) * stride
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    length = tl.load(LENGTHS + row)
    found = tl.zeros((), tl.int64)
    if (tl.load(LIMITS + row) > 0) & (tl.program_id(0) * BLOCK < length):
        equal = place < length
        window = tl.zeros((BLOCK,), tl.int64)
        for back in tl.static_range(LONGEST):
            end = tl.load(HISTORY + tl.maximum(length - 1 - back, 0))
            equal &= place > back
            equal &= tl.load(HISTORY + place - 1 - back, mask=equal, other=0) == end
            window += equal.to(tl.int64)
        found = tl.max(tl.where(window >= SHORTEST, (window << 32) + place, 0), 0)
    tl.store(FOUND + row * tl.num_programs(0) + tl.program_id(0), found)


@triton.jit
def _copy_kernel(
    HISTORY,
    LENGTHS,
    LIMITS,
    FOUND,
    IDS,
    LENS,
    WINDOWS,
    stride,
    blocks,
    LONGEST: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH2: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    block = tl.arange(0, BLOCKS)
    draft = tl.arange(0, WIDTH2)
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    found = tl.max(tl.load(FOUND + row * blocks + block, mask=block < blocks, other=0), 0)
    window, start = found >> 32, found & 0x7FFFFFFF
    one = tl.full((), 1, tl.int64)
    trusted = tl.where(window == LONGEST, WIDTH, one << tl.minimum(tl.maximum(window - 2, 0), 30))
    count = tl.minimum(tl.minimum(trusted, tl.load(LIMITS + row)), WIDTH)
    count = tl.where(found > 0, tl.maximum(count, 0), 0)
    period = tl.maximum(tl.load(LENGTHS + row) - start, 1)
    text = HISTORY + row.to(tl.int64) * stride + start + draft % period
    ids = tl.load(text, mask=draft < count, other=0).to(tl.int64)
    tl.store(IDS + row * WIDTH + draft, ids, mask=draft < WIDTH)
    tl.store(LENS + row, count)
    tl.store(WINDOWS + row, tl.where(count > 0, window, 0))


def match_ngrams(
    history: torch.Tensor,
    lengths: torch.Tensor,
    *,
    shortest: int,
    longest: int,
    width: int,
    limits: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As :func:`specdec_kernels.matching.match_ngrams`; rows of ``history`` are contiguous."""
    rows, size = history.shape
    device = history.device
    ids = torch.empty(rows, width, dtype=torch.int64, device=device)
    lens = torch.empty(rows, dtype=torch.int64, device=device)
    windows = torch.empty_like(lens)
    if not rows:
        return ids, lens, windows
    block = min(_BLOCK, max(32, triton.next_power_of_2(size)))
    blocks = -(-size // block)
    found = torch.empty(rows, blocks, dtype=torch.int64, device=device)
    launch(
        _find_kernel,
        (blocks, rows),
        *(history, lengths, limits, found, history.stride(0)),
        SHORTEST=shortest,
        LONGEST=longest,
        BLOCK=block,
        num_warps=4 if block > 256 else 1,
    )
    launch(
        _copy_kernel,
        (rows,),
        *(history, lengths, limits, found, ids, lens, windows, history.stride(0), blocks),
        LONGEST=longest,
        WIDTH=width,
        WIDTH2=triton.next_power_of_2(width),
        BLOCKS=triton.next_power_of_2(blocks),
        num_warps=1,
    )
    return ids, lens, windows
