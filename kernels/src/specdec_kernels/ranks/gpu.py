"""Sums over ranks in Triton: for other kernels' epilogues, and as a kernel of their own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from ..gpu import launch
from . import mail as layout
from .mail import Mail

_DONE: tl.constexpr = tl.constexpr(layout.DONE)
_STOP: tl.constexpr = tl.constexpr(layout.STOP)
_RANK: tl.constexpr = tl.constexpr(layout.RANK)
_BOXES: tl.constexpr = tl.constexpr(layout.BOXES)
#: Numbers of sums as words carry them: 0 is what nobody wrote yet.
_NUMBERS: tl.constexpr = tl.constexpr(0xFFFFFFFF)
_COLUMNS = 256


@triton.jit
def begin(STATE, RANKS: tl.constexpr):
    """What a program has to know of its sum, asked for early: number, this rank, its memory, all ranks'."""
    number = tl.load(STATE, volatile=True)
    rank = tl.load(STATE + _RANK)
    own = tl.load(STATE + _BOXES + rank)
    index = tl.arange(0, triton.next_power_of_2(RANKS))
    boxes = tl.load(STATE + _BOXES + index, mask=index < RANKS, other=0)
    return number, rank, own, boxes


@triton.jit
def pack(low, high):
    """Values as words carry them: two bfloat16 in float32, or with ``high`` None one float32."""
    if high is None:
        return low.to(tl.uint32, bitcast=True)
    else:
        return (low.to(tl.uint32, bitcast=True) >> 16) | (high.to(tl.uint32, bitcast=True) & 0xFFFF0000)


@triton.jit
def unpack(value, PAIRS: tl.constexpr):
    """``low`` and ``high``; without pairs the same twice."""
    if PAIRS:
        low = (value << 16).to(tl.float32, bitcast=True)
        return low, (value & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        low = value.to(tl.float32, bitcast=True)
        return low, low


@triton.jit
def send(value, at, inside, begun, RANKS: tl.constexpr, WORDS: tl.constexpr):
    """Write a tile of this rank's terms into the memory of the others.

    Args:
        value: as :func:`pack` makes it; ``at`` is contiguous in the last dimension, which threads share out.
        at: of each word, below ``WORDS``; the same on all ranks.
        inside: which words there are.
        begun: by :func:`begin`.
    """
    number, rank, _, boxes = begun
    word = value.to(tl.int64) | (_carried(number) << 32)
    place = _half(number, RANKS, WORDS) + rank * WORDS + at
    index = tl.arange(0, triton.next_power_of_2(RANKS))
    if RANKS == 2:
        tl.store(_box(boxes, index, 1 - rank) + place, word, mask=inside)
    else:
        for other in tl.static_range(RANKS):
            tl.store(_box(boxes, index, other) + place, word, mask=_unless(rank, other, at, inside))


@triton.jit
def _box(boxes, index, rank):
    return tl.sum(tl.where(index == rank, boxes, 0), 0).to(tl.pointer_type(tl.int64))


@triton.jit
def _unless(rank, other, at, inside):
    """``inside``, but nothing where it is this rank itself."""
    return inside & (tl.zeros_like(at) + rank != other)


@triton.jit
def receive(value, at, inside, begun, STATE, PAIRS: tl.constexpr, RANKS: tl.constexpr, WORDS: tl.constexpr):
    """Wait for the same tile of the others: the sums of all, in the order of the ranks, ``low`` and ``high``.

    ``value``: what was sent.
    """
    rank = begun[1]
    own = unpack(value, PAIRS)
    if RANKS == 2:  # a sum of two has one order
        theirs = unpack(_words_of(1 - rank, at, inside, begun, STATE, RANKS, WORDS), PAIRS)
        return own[0] + theirs[0], own[1] + theirs[1]
    else:
        low, high = own
        for other in tl.static_range(RANKS):
            waited = _unless(rank, other, at, inside)
            theirs = unpack(_words_of(other, at, waited, begun, STATE, RANKS, WORDS), PAIRS)
            one = tl.where(rank == other, own[0], theirs[0])
            another = tl.where(rank == other, own[1], theirs[1])
            low = one if other == 0 else low + one
            high = another if other == 0 else high + another
        return low, high


@triton.jit
def _words_of(other, at, inside, begun, STATE, RANKS: tl.constexpr, WORDS: tl.constexpr):
    """What another rank sent, once all of the tile has come; or as it is, once nobody is to be waited for."""
    number, _, own, _ = begun
    address = own.to(tl.pointer_type(tl.int64)) + _half(number, RANKS, WORDS) + other * WORDS + at
    carried = _carried(number).to(tl.uint32)
    words = tl.load(address, mask=inside, other=0, volatile=True)
    late = _late(words, carried, inside)
    while late:
        words = tl.load(address, mask=inside, other=0, volatile=True)
        stop = tl.load(STATE + _STOP, volatile=True)
        late = _late(words, carried, inside) & (stop == 0)
    return words.to(tl.uint32)


@triton.jit
def _late(words, carried, inside):
    missing = (inside & ((words >> 32).to(tl.uint32) != carried)).to(tl.int32)
    return tl.max(tl.ravel(missing), 0) > 0


@triton.jit
def send_tile(
    x, row, m, M, N, begun, ROWS: tl.constexpr, B: tl.constexpr, PAIRS: tl.constexpr, RANKS: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """:func:`send` outputs ``row`` of tokens from ``m`` on, ``[ROWS, B]``, pairs of tokens: what was sent."""
    at, inside = _place(row, m, M, N, B, PAIRS)
    if PAIRS:
        low, high = tl.split(tl.reshape(tl.trans(x), (B // 2, 2, ROWS)).permute(0, 2, 1))
        value = pack(low, high)
    else:
        value = pack(tl.trans(x), None)
    send(value, at, inside, begun, RANKS, WORDS)
    return value


@triton.jit
def receive_tile(
    value, row, m, M, N, begun, STATE, ROWS: tl.constexpr, B: tl.constexpr, PAIRS: tl.constexpr,
    RANKS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """:func:`receive` what :func:`send_tile` sent: ``[ROWS, B]`` float32."""
    at, inside = _place(row, m, M, N, B, PAIRS)
    low, high = receive(value, at, inside, begun, STATE, PAIRS, RANKS, WORDS)
    if PAIRS:
        return tl.trans(tl.reshape(tl.join(low, high).permute(0, 2, 1), (B, ROWS)))
    else:
        return tl.trans(low)


@triton.jit
def _place(row, m, M, N, B: tl.constexpr, PAIRS: tl.constexpr):
    """Where the words of a tile lie, and which of them there are."""
    SHARED: tl.constexpr = 2 if PAIRS else 1  # tokens of a word
    word = m // SHARED + tl.arange(0, B // SHARED)
    return word[:, None] * N + row[None, :], (row < N)[None, :] & (word * SHARED < M)[:, None]


@triton.jit
def end(begun, STATE):
    """A program of the sum is done with it; the last one counts the sum."""
    tl.debug_barrier()  # all of its threads are
    if tl.atomic_add(STATE + _DONE, 1) == tl.num_programs(0) - 1:
        tl.store(STATE + _DONE, 0)
        tl.store(STATE, begun[0] + 1)


@triton.jit
def _carried(number):
    return number % _NUMBERS + 1


@triton.jit
def _half(number, RANKS: tl.constexpr, WORDS: tl.constexpr):
    return number % 2 * (RANKS * WORDS)


@triton.jit(do_not_specialize=["N"])
def sum_kernel(
    X, Y, N, STATE, PAIRS: tl.constexpr, RANKS: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """``BLOCK`` words of the sum of all ranks' ``X``; with ``PAIRS`` each of two elements."""
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    begun = begin(STATE, RANKS)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first = at * 2 if PAIRS else at
    low = tl.load(X + first, mask=first < N, other=0.0).to(tl.float32)
    if PAIRS:
        value = pack(low, tl.load(X + first + 1, mask=first + 1 < N, other=0.0).to(tl.float32))
    else:
        value = pack(low, None)
    send(value, at, first < N, begun, RANKS, WORDS)
    low, high = receive(value, at, first < N, begun, STATE, PAIRS, RANKS, WORDS)
    tl.store(Y + first, low, mask=first < N)
    if PAIRS:
        tl.store(Y + first + 1, high, mask=first + 1 < N)
    end(begun, STATE)


def sum_over_ranks(x: torch.Tensor, mail: Mail) -> torch.Tensor:
    y, pairs = torch.empty_like(x), x.dtype is torch.bfloat16
    words = -(-x.numel() // 2) if pairs else x.numel()
    launch(
        sum_kernel,
        (-(-words // _COLUMNS),),
        *(x, y, x.numel(), mail.state),
        PAIRS=pairs,
        RANKS=mail.ranks,
        WORDS=mail.words,
        BLOCK=_COLUMNS,
        num_warps=4,
    )
    return y
