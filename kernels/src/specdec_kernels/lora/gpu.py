"""What adapters add, in Triton: ``A x`` in chunks of the inputs, then their sum times ``B``.

Tokens are taken 16 at a time, as rows of a tensor core's tile, so each has its own sums; tokens of other
adapters stand in the tile as zeros. A chunk's size depends on the layer alone, and chunks are added in their
order: a token's bits are the same in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from ..gpu import launch

#: Tokens of a tile: the rows of a tensor core's smallest product.
_TOKENS: tl.constexpr = tl.constexpr(16)
#: Outputs of a tile.
_OUTPUTS = 128
#: Inputs summed in a step of the loop.
_INPUTS = 128


def lora_delta(
    x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, slots: torch.Tensor, parts: Sequence[int]
) -> torch.Tensor:
    tokens, inputs = x.shape
    num_slots, outputs, rank = b.shape
    delta = x.new_empty(tokens, outputs)
    if not tokens:
        return delta
    padded = max(16, triton.next_power_of_2(rank))
    chunk = _chunk(inputs)
    chunks, tiles = -(-inputs // chunk), -(-tokens // _TOKENS.value)
    middle = x.new_empty((chunks, tokens, len(parts) * rank), dtype=torch.float32)
    launch(
        shrink_kernel,
        (tiles, chunks, num_slots * len(parts)),
        *(x.contiguous(), a, slots, middle, tokens),
        K=inputs,
        R=rank,
        RP=padded,
        PARTS=len(parts),
        CHUNK=chunk,
        BK=_INPUTS,
        num_warps=4,
        num_stages=3,
    )
    first, second, *_ = [*parts, 0]
    launch(
        expand_kernel,
        (sum(-(-part // _OUTPUTS) for part in parts), tiles),
        *(middle, b, slots, delta, tokens, num_slots),
        N=outputs,
        R=rank,
        RP=padded,
        PARTS=len(parts),
        CHUNKS=chunks,
        FIRST=first,
        SECOND=second,
        BN=_OUTPUTS,
        num_warps=4,
    )
    return delta


def _chunk(inputs: int) -> int:
    """Inputs that one program sums: few enough to keep a card busy with a single adapter."""
    return 512 if inputs <= 8192 else 1024


@triton.jit(do_not_specialize=["M"])
def shrink_kernel(
    X,
    A,
    SLOTS,
    MIDDLE,
    M,
    K: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A chunk's share of ``A x``, of one part of one slot, for those of 16 tokens whose slot it is."""
    m = tl.program_id(0) * _TOKENS + tl.arange(0, _TOKENS)
    chunk = tl.program_id(1)
    part = tl.program_id(2)  # of all slots, one behind the other
    if PDL:  # by every program, or what comes next would not wait for what came before
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    own = tl.load(SLOTS + m, mask=m < M, other=-1) == part // PARTS
    if tl.max(own.to(tl.int32), 0) > 0:
        j = tl.arange(0, RP)
        k0 = chunk * CHUNK + tl.arange(0, BK)
        x = X + m.to(tl.int64)[:, None] * K + k0[None, :]
        a = A + (part * R + j).to(tl.int64)[None, :] * K + k0[:, None]
        total = tl.zeros((_TOKENS, RP), tl.float32)
        for k in tl.range(0, CHUNK, BK):
            inside = k0 + k < K
            tokens = tl.load(x + k, mask=own[:, None] & inside[None, :], other=0.0)
            weights = tl.load(a + k, mask=(j < R)[None, :] & inside[:, None], other=0.0)
            total = tl.dot(tokens, weights, total, input_precision="ieee")
        at = ((chunk * M + m) * PARTS + part % PARTS) * R
        tl.store(MIDDLE + at[:, None] + j[None, :], total, mask=own[:, None] & (j < R)[None, :])


@triton.jit(do_not_specialize=["M", "num_slots"])
def expand_kernel(
    MIDDLE,
    B,
    SLOTS,
    DELTA,
    M,
    num_slots,
    N: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    BN: tl.constexpr,
    PDL: tl.constexpr,
):
    """``B`` times the sum of the chunks, for 16 tokens and ``BN`` outputs of one part."""
    tile = tl.program_id(0)
    m = tl.program_id(1) * _TOKENS + tl.arange(0, _TOKENS)
    before_second: tl.constexpr = (FIRST + BN - 1) // BN
    before_third: tl.constexpr = before_second + (SECOND + BN - 1) // BN
    part, start, stop = 0, 0, FIRST
    if tile >= before_third:
        part, start, stop = 2, FIRST + SECOND, N
        tile -= before_third
    elif tile >= before_second:
        part, start, stop = 1, FIRST, FIRST + SECOND
        tile -= before_second
    row = start + tile * BN + tl.arange(0, BN)
    there = row < stop
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    own = tl.load(SLOTS + m, mask=m < M, other=-1)
    total = tl.zeros((_TOKENS, BN), tl.float32)
    if tl.max(own, 0) >= 0:
        j = tl.arange(0, RP)
        at = (m * PARTS + part) * R
        mask = (own >= 0)[:, None] & (j < R)[None, :]
        middle = tl.zeros((_TOKENS, RP), tl.float32)
        for chunk in range(CHUNKS):
            chunk_at = (at + chunk * M * PARTS * R)[:, None] + j[None, :]
            middle += tl.load(MIDDLE + chunk_at, mask=mask, other=0.0)
        for slot in range(num_slots):
            mine = own == slot
            if tl.max(mine.to(tl.int32), 0) > 0:
                weights = tl.load(
                    B + (slot * N + row).to(tl.int64)[None, :] * R + j[:, None],
                    mask=there[None, :] & (j < R)[:, None],
                    other=0.0,
                )
                # of all tokens, and kept of some: what is not finite in one adapter stays there
                product = tl.dot(middle.to(weights.dtype), weights, input_precision="ieee")
                total = tl.where(mine[:, None], product, total)
    tl.store(
        DELTA + m.to(tl.int64)[:, None] * N + row[None, :], total, mask=there[None, :] & (m < M)[:, None]
    )
