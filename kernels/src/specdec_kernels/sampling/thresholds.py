"""Thresholds of min_p, top-k and top-p in Triton, without a sort: one program a row.

A threshold is the largest key ``t`` (a float32's bits in an order of integers) for which the tokens from
``t`` on weigh enough: by their number for top-k, by their probability for top-p. Probabilities are integers,
``exp(x - max)`` in units of 2**-40: their sums are exact in any order, so that a threshold is a function of
the row's logits alone, however it is found, and the same for bfloat16 logits as for their float32 copy.

How it is found: the row is read once for its largest value and those of ``BLOCK`` groups of it, the groups
tell a bound that few tokens reach, and a second pass weighs the row and sets those few aside, among which the
threshold is searched in registers. Where they turn out too few or too many, the bracket is narrowed by more
passes, two bounds each. A row without filters costs nothing but the launch; others at least two readings of
the row by one multiprocessor, about 5 us each at 128k tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from ..gpu import launch

#: Logits read at a time, which is also the number of groups.
BLOCK = 8192
#: Tokens that are set aside at most.
KEPT = 4096
#: Tokens that top-p without top-k hopes to do with.
GUESS = 1024

_OUT = tl.constexpr(float("-inf"))
_KEY_OUT = tl.constexpr(-2139095041)  # the key of -inf
_UNIT = tl.constexpr(2.0**40)


@triton.jit
def _key(x):
    """The place of a float32 in the order of all, as int32; 0 and -0 are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    """The float32 of a key, given as int64."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _scaled(x, temperature, SCALED: tl.constexpr):
    if SCALED:
        x = tl.div_rn(x, temperature)
    return x


@triton.jit
def _weight(x, temperature, most, floor, SCALED: tl.constexpr, MASS: tl.constexpr):
    """What tokens of logit ``x`` weigh, int64: one each, or their probability if not below ``floor``."""
    if MASS:
        y = _scaled(x, temperature, SCALED)
        return tl.where(y >= floor, (tl.exp(y - most) * _UNIT).to(tl.int64), 0)
    else:
        return tl.full(x.shape, 1, tl.int64)


@triton.jit
def _weigh(
    X,
    V,
    temperature,
    most,
    floor,
    low,
    high,
    KEPT_VALUES,
    COUNT,
    SCALED: tl.constexpr,
    MASS: tl.constexpr,
    GATHER: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One pass: number and weight of the tokens from ``low`` on, of those from ``high`` on, weight of all.

    With ``GATHER`` the logits from ``low`` up to ``high`` are set aside, as many as there is room for; their
    order is open, and nothing depends on it.
    """
    inner = tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    number_low = tl.zeros((BLOCK // 8,), tl.int32)
    number_high = tl.zeros((BLOCK // 8,), tl.int32)
    weight_low = tl.zeros((BLOCK // 8,), tl.int64)
    weight_high = tl.zeros((BLOCK // 8,), tl.int64)
    total = tl.zeros((BLOCK // 8,), tl.int64)
    for first in tl.range(0, V, BLOCK, num_stages=STAGES):
        token = first + inner
        x = tl.load(X + token, mask=token < V, other=_OUT).to(tl.float32)
        key = _key(x)
        from_low = (key >= low) & (token < V)
        from_high = (key >= high) & (token < V)
        number_low += tl.sum(from_low.to(tl.int32), 1)
        number_high += tl.sum(from_high.to(tl.int32), 1)
        if MASS:
            weight = _weight(x, temperature, most, floor, SCALED, MASS)
            weight_low += tl.sum(tl.where(from_low, weight, 0), 1)
            weight_high += tl.sum(tl.where(from_high, weight, 0), 1)
            total += tl.sum(weight, 1)
        if GATHER:
            mine = from_low & (key < high)
            at = tl.atomic_add(COUNT + tl.zeros_like(token), 1, mask=mine, sem="relaxed")
            tl.store(KEPT_VALUES + at, x, mask=mine & (at < KEPT))
    n_low = tl.sum(number_low, 0).to(tl.int64)
    n_high = tl.sum(number_high, 0).to(tl.int64)
    if MASS:
        return n_low, tl.sum(weight_low, 0), n_high, tl.sum(weight_high, 0), tl.sum(total, 0)
    else:
        return n_low, n_low, n_high, n_high, n_low


@triton.jit
def _empty(COUNT):
    """Forget what was set aside."""
    tl.debug_barrier()
    tl.store(COUNT, 0)
    tl.debug_barrier()


@triton.jit
def _kept_values(KEPT_VALUES, held, KEPT: tl.constexpr):
    """What was set aside, and which of it is there."""
    tl.debug_barrier()
    place = tl.arange(0, KEPT)
    there = place < held
    return tl.load(KEPT_VALUES + place, mask=there, other=_OUT, cache_modifier=".cg"), there


@triton.jit
def _search(keys, weights, goal, lo, hi, above):
    """The largest key below ``hi`` from which on there is ``goal``, of which ``above`` from ``hi`` on."""
    while hi - lo > 1:
        middle = lo + (hi - lo) // 2
        enough = above + tl.sum(tl.where(keys >= middle, weights, 0), 0) >= goal
        lo = tl.where(enough, middle, lo)
        hi = tl.where(enough, hi, middle)
    return lo


@triton.jit
def _bound(group_keys, top, number, BLOCK: tl.constexpr):
    """The largest key that ``number`` groups reach; if there are not so many, the least above -inf."""
    lowest = tl.min(tl.min(group_keys, 1), 0).to(tl.int64)
    lo = tl.where(number <= BLOCK, lowest, _KEY_OUT)
    hi = top + 1
    while hi - lo > 1:
        middle = lo + (hi - lo) // 2
        enough = tl.sum(tl.sum((group_keys >= middle).to(tl.int32), 1), 0) >= number
        lo = tl.where(enough, middle, lo)
        hi = tl.where(enough, hi, middle)
    return tl.maximum(lo, _KEY_OUT + 1)


@triton.jit
def _goal(p, total):
    """The least weight that is a share ``p`` of all, and something."""
    share = p.to(tl.float64) * total.to(tl.float64)
    whole = share.to(tl.int64)
    return tl.maximum(whole + (whole.to(tl.float64) < share).to(tl.int64), 1)


@triton.jit
def _select(
    X,
    V,
    temperature,
    top,
    most,
    floor,
    bound,
    wanted,
    KEPT_VALUES,
    COUNT,
    SCALED: tl.constexpr,
    MASS: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The threshold for ``wanted`` tokens, or that share of the weight; how many tokens were set aside.

    Those are all from ``bound`` on; -1 where it was not they that decided.
    """
    _empty(COUNT)
    number, weight, _a, _b, total = _weigh(
        X, V, temperature, most, floor, bound, top + 1, KEPT_VALUES, COUNT,
        SCALED, MASS, True, KEPT, BLOCK, STAGES,
    )  # fmt: skip
    goal = wanted
    if MASS:
        goal = _goal(wanted, total)
    enough = weight >= goal
    lo = tl.where(enough, bound, _KEY_OUT)
    hi = tl.where(enough, top + 1, bound)
    number_lo = tl.where(enough, number, V.to(tl.int64))
    number_hi = tl.where(enough, 0, number)
    above = tl.where(enough, 0, weight)
    held = tl.where(enough & (number <= KEPT), number, -1)
    highest = _value(top)
    while (held < 0) & (number_lo - number_hi > KEPT) & (hi - lo > 1):
        # Halve the values, which logits are spread over evenly, and the keys, which ends for certain.
        low_value = tl.maximum(_value(lo), highest - 32.0 * temperature)
        first = _key(0.5 * low_value + 0.5 * _value(hi - 1)).to(tl.int64)
        first = tl.minimum(tl.maximum(first, lo + 1), hi - 1)
        second = lo + (hi - lo) // 2
        n1, w1, n2, w2, _t = _weigh(
            X, V, temperature, most, floor, first, second, KEPT_VALUES, COUNT,
            SCALED, MASS, False, KEPT, BLOCK, STAGES,
        )  # fmt: skip
        for turn in tl.static_range(2):
            pivot = first if turn == 0 else second
            n = n1 if turn == 0 else n2
            w = w1 if turn == 0 else w2
            rises = (w >= goal) & (pivot > lo)
            falls = (w < goal) & (pivot < hi)
            lo = tl.where(rises, pivot, lo)
            number_lo = tl.where(rises, n, number_lo)
            hi = tl.where(falls, pivot, hi)
            number_hi = tl.where(falls, n, number_hi)
            above = tl.where(falls, w, above)
    aside = held
    if held < 0:
        _empty(COUNT)
        _n1, _w1, _n2, _w2, _t = _weigh(
            X, V, temperature, most, floor, lo, hi, KEPT_VALUES, COUNT,
            SCALED, MASS, True, KEPT, BLOCK, STAGES,
        )  # fmt: skip
        aside = tl.minimum(number_lo - number_hi, KEPT)
    values, there = _kept_values(KEPT_VALUES, aside, KEPT)
    weights = tl.where(there, _weight(values, temperature, most, floor, SCALED, MASS), 0)
    return _search(_key(values), weights, goal, lo, hi, above), held


@triton.jit(do_not_specialize=["T"])
def _floor_kernel(
    X,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    MIN_P,
    FLOOR,
    KEPT_VALUES,
    COUNT,
    V,
    x_stride,
    T,
    SCALED: tl.constexpr,
    HAS_K: tl.constexpr,
    HAS_P: tl.constexpr,
    HAS_MIN: tl.constexpr,
    KEPT: tl.constexpr,
    GUESS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    own = row // T
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    temperature = tl.full((), 1.0, tl.float32)
    k = tl.zeros((), tl.int64)
    p = tl.full((), 1.0, tl.float32)
    least = tl.zeros((), tl.float32)
    if SCALED:
        temperature = tl.load(TEMPERATURE + own)
    if HAS_K:
        k = tl.load(TOP_K + own)
        k = tl.where(k < V, k, 0)
    if HAS_P:
        p = tl.load(TOP_P + own)
    if HAS_MIN:
        least = tl.load(MIN_P + own)
    floor = tl.full((), _OUT, tl.float32)
    X += row.to(tl.int64) * x_stride
    KEPT_VALUES += row.to(tl.int64) * KEPT
    COUNT += row
    if (temperature != 0) & ((k > 0) | (p < 1) | (least > 0)):
        inner = tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
        groups = tl.full((BLOCK // 8, 8), _OUT, tl.float32)
        for first in tl.range(0, V, BLOCK, num_stages=STAGES):
            x = tl.load(X + first + inner, mask=first + inner < V, other=_OUT).to(tl.float32)
            groups = tl.maximum(groups, x)
        highest = tl.max(tl.max(groups, 1), 0)
        most = _scaled(highest, temperature, SCALED)
        if most > _OUT:
            top = _key(highest).to(tl.int64)
            keys = _key(groups)
            if least > 0:
                floor = most + tl.log(least)
            bound = tl.full((), _KEY_OUT + 1, tl.int64)
            held = tl.full((), -1, tl.int64)
            if HAS_K:  # noqa: SIM102 -- known when it is compiled, the other is not
                if k > 0:
                    bound = _bound(keys, top, tl.where(k <= BLOCK, k, GUESS), BLOCK)
                    bound, held = _select(
                        X, V, temperature, top, most, floor, bound, k, KEPT_VALUES, COUNT,
                        SCALED, False, KEPT, BLOCK, STAGES,
                    )  # fmt: skip
                    floor = tl.maximum(floor, _scaled(_value(bound), temperature, SCALED))
            if HAS_P:  # noqa: SIM102
                if p < 1:
                    if held >= 0:  # all that top-k left was set aside
                        values, there = _kept_values(KEPT_VALUES, held, KEPT)
                        weights = tl.where(there, _weight(values, temperature, most, floor, SCALED, True), 0)
                        goal = _goal(p, tl.sum(weights, 0))
                        bound = _search(_key(values), weights, goal, bound, top + 1, tl.zeros((), tl.int64))
                    else:
                        bound = tl.maximum(bound, _bound(keys, top, tl.full((), GUESS, tl.int64), BLOCK))
                        bound, held = _select(
                            X, V, temperature, top, most, floor, bound, p, KEPT_VALUES, COUNT,
                            SCALED, True, KEPT, BLOCK, STAGES,
                        )  # fmt: skip
                    floor = tl.maximum(floor, _scaled(_value(bound), temperature, SCALED))
    tl.store(FLOOR + row, floor)


def floors(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    tokens_per_row: int = 1,
) -> torch.Tensor:
    """The least logit / temperature that each row keeps, ``[N]`` float32: -inf where it has no filter.

    Args:
        logits: ``[N, V]`` float32 or bfloat16, the last dimension contiguous.
        temperature: ``[B]`` float32, 0: no filter; None: 1.
        top_k: ``[B]`` int64, 0: off.
        top_p, min_p: ``[B]`` float32, 1 and 0: off.
    """
    rows, size = logits.shape
    floor = torch.empty(rows, device=logits.device)
    if not rows:
        return floor
    block = min(BLOCK, max(64, triton.next_power_of_2(size)))
    launch(
        _floor_kernel,
        (rows,),
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        floor,
        torch.empty(rows, KEPT, device=logits.device),
        torch.empty(rows, dtype=torch.int32, device=logits.device),
        size,
        logits.stride(0),
        tokens_per_row,
        SCALED=temperature is not None,
        HAS_K=top_k is not None,
        HAS_P=top_p is not None,
        HAS_MIN=min_p is not None,
        KEPT=KEPT,
        GUESS=GUESS,
        BLOCK=block,
        STAGES=3,
        num_warps=min(16, max(1, block // 256)),
        enable_fp_fusion=False,
    )
    return floor
