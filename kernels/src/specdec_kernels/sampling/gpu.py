"""The draw in Triton: scores of blocks of a row's logits, then the best of the blocks.

A row costs its logits read once and, where it is sampled, the arithmetic of its noise (about 38 instructions
a token, 10 us for 48 rows of 128k tokens on an H100). Maxima are exact, so that the blocks' size, which is
chosen by the number of rows, is no part of the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from ..gpu import launch
from ..noise.gpu import gumbel_of, words_at, words_of
from .reference import keep_from, take
from .thresholds import floors

_BLOCK = 4096
_SMALL_BLOCK = 1024
#: Programs from which on the larger blocks are used: as many as keep an H100 busy.
_MANY_PROGRAMS = 264
#: Blocks of which the ranks are found; one size, since sums of probabilities depend on it.
_RANK_BLOCK = 2048

_OUT = tl.constexpr(float("-inf"))
_NO_ID = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _scored(
    X,
    IDS,
    SEED,
    INDEX,
    POSITION,
    TEMPERATURE,
    FLOOR,
    row,
    own,
    V,
    x_stride,
    stream,
    SAMPLED: tl.constexpr,
    FILTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of this program's block, ``[BLOCK / 4, 4]``: logits of the law, those plus noise, token ids.

    ``IDS``: the id of each column, where those are not the columns' numbers; behind the last, none.
    """
    group = tl.program_id(0) * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    token = group[:, None] * 4 + tl.arange(0, 4)[None, :]
    x = tl.load(X + row.to(tl.int64) * x_stride + token, mask=token < V, other=_OUT).to(tl.float32)
    if IDS is not None:
        token = tl.load(IDS + token, mask=token < V, other=_NO_ID).to(tl.int32)
    score = x
    if SAMPLED:
        temperature = tl.load(TEMPERATURE + own)
        if temperature != 0:
            x = tl.div_rn(x, temperature)
            some = True
            if FILTERED:
                x = tl.where(x < tl.load(FLOOR + row), _OUT, x)  # which leaves NaN
                some = tl.max(tl.max(x, 1), 0) > _OUT
            score = x
            if some:
                seed, index = tl.load(SEED + own), tl.load(INDEX + own)
                position = tl.load(POSITION + row)
                if IDS is not None:
                    words = words_at(seed, index, position, stream, token)
                else:
                    words = words_of(seed, index, position, stream, group)
                score = x + gumbel_of(words)
    return x, score, token


@triton.jit(do_not_specialize=["T", "stream"])
def _best_kernel(
    X,
    IDS,
    SEED,
    INDEX,
    POSITION,
    TEMPERATURE,
    FLOOR,
    BEST,
    BEST_ID,
    V,
    x_stride,
    T,
    stream,
    SAMPLED: tl.constexpr,
    FILTERED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(1)
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    x, score, token = _scored(
        X, IDS, SEED, INDEX, POSITION, TEMPERATURE, FLOOR, row, row // T, V, x_stride, stream,
        SAMPLED, FILTERED, BLOCK,
    )  # fmt: skip
    # NaN beats all, under an id that says that there is none.
    token = tl.where(x != x, -1, token)
    score = tl.where(x != x, float("inf"), score)
    best = tl.max(tl.max(score, 1), 0)
    first = tl.min(tl.min(tl.where(score == best, token, _NO_ID), 1), 0)
    out = row * tl.num_programs(0) + tl.program_id(0)
    tl.store(BEST + out, best)
    tl.store(BEST_ID + out, first)


@triton.jit
def _pick_kernel(BEST, BEST_ID, OUT, blocks, BLOCKS: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0)
    block = tl.arange(0, BLOCKS)
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    scores = tl.load(BEST + row * blocks + block, mask=block < blocks, other=_OUT)
    ids = tl.load(BEST_ID + row * blocks + block, mask=block < blocks, other=_NO_ID)
    best = tl.max(scores, 0)
    first = tl.min(tl.where(scores == best, ids, _NO_ID), 0)
    tl.store(OUT + row, tl.where(best > _OUT, first, -1).to(tl.int64))


@triton.jit
def _next_best(score, token, there, best, first):
    """The score and id that come after ``best`` and ``first``: lower ones, of equal scores higher ids."""
    left = there & ((score < best) | ((score == best) & (token > first)))
    best = tl.max(tl.where(left, score, _OUT), 0)
    return best, tl.min(tl.where(left & (score == best), token, _NO_ID), 0)


@triton.jit(do_not_specialize=["T", "stream"])
def _rank_kernel(
    X,
    IDS,
    SEED,
    INDEX,
    POSITION,
    TEMPERATURE,
    FLOOR,
    BEST,
    BEST_ID,
    MOST,
    MASS,
    V,
    x_stride,
    T,
    stream,
    K: tl.constexpr,
    SAMPLED: tl.constexpr,
    FILTERED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(1)
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    x, score, token = _scored(
        X, IDS, SEED, INDEX, POSITION, TEMPERATURE, FLOOR, row, row // T, V, x_stride, stream,
        SAMPLED, FILTERED, BLOCK,
    )  # fmt: skip
    out = row * tl.num_programs(0) + tl.program_id(0)
    most = tl.max(tl.max(x, 1), 0)
    tl.store(MOST + out, most)
    tl.store(MASS + out, tl.sum(tl.sum(tl.exp(x - tl.where(most > _OUT, most, 0.0)), 1), 0))
    flat_score = tl.reshape(score, (BLOCK,))
    flat_token = tl.reshape(token, (BLOCK,))
    flat_there = flat_token < (V if IDS is None else _NO_ID)
    best = tl.full((), float("inf"), tl.float32)
    first = tl.full((), -1, tl.int32)
    for rank in tl.static_range(K):
        best, first = _next_best(flat_score, flat_token, flat_there, best, first)
        tl.store(BEST + out * K + rank, best)
        tl.store(BEST_ID + out * K + rank, first)


@triton.jit
def _merge_kernel(
    BEST,
    BEST_ID,
    MOST,
    MASS,
    IDS,
    SCORES,
    blocks,
    K: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    block = tl.arange(0, BLOCKS)
    place = tl.arange(0, BLOCKS * RANKS)
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    most = tl.load(MOST + row * blocks + block, mask=block < blocks, other=_OUT)
    mass = tl.load(MASS + row * blocks + block, mask=block < blocks, other=0.0)
    top = tl.max(most, 0)
    normalizer = top + tl.log(tl.sum(mass * tl.exp(most - tl.where(top > _OUT, top, 0.0)), 0))
    there = place < blocks * K
    score = tl.load(BEST + row * blocks * K + place, mask=there, other=_OUT)
    token = tl.load(BEST_ID + row * blocks * K + place, mask=there, other=_NO_ID)
    there &= token != _NO_ID
    best = tl.full((), float("inf"), tl.float32)
    first = tl.full((), -1, tl.int32)
    for rank in tl.static_range(K):
        best, first = _next_best(score, token, there, best, first)
        tl.store(SCORES + row * K + rank, best - normalizer)
        tl.store(IDS + row * K + rank, tl.where(first == _NO_ID, 0, first).to(tl.int64))


def keep(
    logits: torch.Tensor,
    rows: torch.Tensor | None,
    *,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
) -> None:
    """Exclude from ``rows``, None for all, what lies below the floors of their filters, each ``[N]``."""
    part = take(logits, rows)
    keep_from(logits, rows, part, floors(part, top_k=top_k, top_p=top_p, min_p=min_p))


def draw_tokens(
    logits: torch.Tensor,
    positions: torch.Tensor,
    *,
    seed: torch.Tensor,
    index: torch.Tensor,
    temperature: torch.Tensor | None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    tokens_per_row: int = 1,
    stream: int = 0,
    ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """As :func:`specdec_kernels.sampling.draw_tokens`."""
    rows, size = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return out
    floor = _floors(logits, temperature, top_k, top_p, min_p, tokens_per_row)
    many = rows * -(-size // _BLOCK) >= _MANY_PROGRAMS
    block = min(_BLOCK if many else _SMALL_BLOCK, max(64, triton.next_power_of_2(size)))
    blocks = -(-size // block)
    best = torch.empty(rows, blocks, device=logits.device)
    best_id = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    launch(
        _best_kernel,
        (blocks, rows),
        *(logits, ids, seed, index, positions.contiguous(), temperature, floor, best, best_id),
        *(size, logits.stride(0), tokens_per_row, stream),
        SAMPLED=temperature is not None,
        FILTERED=floor is not None,
        BLOCK=block,
        num_warps=4 if block > 512 else 1,
        enable_fp_fusion=False,
    )
    launch(
        _pick_kernel,
        (rows,),
        *(best, best_id, out, blocks),
        BLOCKS=triton.next_power_of_2(blocks),
        num_warps=1,
    )
    return out


def rank_tokens(
    logits: torch.Tensor,
    positions: torch.Tensor,
    *,
    k: int,
    seed: torch.Tensor,
    index: torch.Tensor,
    temperature: torch.Tensor | None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    tokens_per_row: int = 1,
    stream: int = 0,
    ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`specdec_kernels.sampling.rank_tokens`, for a small ``k``."""
    rows, size = logits.shape
    device = logits.device
    ranked = torch.empty(rows, k, dtype=torch.int64, device=device)
    scores = torch.empty(rows, k, device=device)
    if not rows:
        return ranked, scores
    floor = _floors(logits, temperature, top_k, top_p, min_p, tokens_per_row)
    block = min(_RANK_BLOCK, max(64, triton.next_power_of_2(size)))
    blocks = -(-size // block)
    best = torch.empty(rows, blocks, k, device=device)
    best_id = torch.empty(rows, blocks, k, dtype=torch.int32, device=device)
    most, mass = torch.empty(rows, blocks, device=device), torch.empty(rows, blocks, device=device)
    launch(
        _rank_kernel,
        (blocks, rows),
        *(logits, ids, seed, index, positions.contiguous(), temperature, floor),
        *(best, best_id, most, mass),
        *(size, logits.stride(0), tokens_per_row, stream),
        K=k,
        SAMPLED=temperature is not None,
        FILTERED=floor is not None,
        BLOCK=block,
        num_warps=4 if block > 512 else 1,
        enable_fp_fusion=False,
    )
    launch(
        _merge_kernel,
        (rows,),
        *(best, best_id, most, mass, ranked, scores, blocks),
        K=k,
        RANKS=triton.next_power_of_2(k),
        BLOCKS=triton.next_power_of_2(blocks),
        num_warps=4,
        enable_fp_fusion=False,
    )
    return ranked, scores


def _floors(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    tokens_per_row: int,
) -> torch.Tensor | None:
    if temperature is None or (top_k is None and top_p is None and min_p is None):
        return None
    return floors(
        logits,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        tokens_per_row=tokens_per_row,
    )
