"""Rotary position embedding by a Triton kernel, which also stores keys and values where it is asked to.

The floor is one read and one write of the heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from ..gpu import launch, takes

#: Heads times dimensions of a program.
_ELEMENTS = 2048


@triton.jit
def stored(x, DTYPE: tl.constexpr):
    """``x`` as a cache of ``DTYPE`` holds it; in float8 what is too large becomes the greatest, NaN stays."""
    if tl.float8e4nv == DTYPE:  # by bits, which the interpreter can do as well
        x = x.to(tl.float32)
        size = tl.where(tl.abs(x) > 448.0, 448.0, tl.abs(x))
        bits = size.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + (bits >> 20 & 1)) >> 20) - (120 << 3)
        # below 2^-6 in steps of 2^-9, which is what a sum with 2^14 is rounded to
        small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(x != x, 0x7F, tl.where(size < 0.015625, small, normal))
        code = code | (x.to(tl.int32, bitcast=True) >> 24 & 0x80)
        return code.to(tl.uint8).to(DTYPE, bitcast=True)
    else:
        return x.to(DTYPE)


@triton.jit(do_not_specialize=["count"])
def rotate_heads(
    HEADS, COS, SIN, QUERY, KEYS, VALUES, SLOTS, token_stride, head_stride, count,
    TURNED: tl.constexpr, KEPT: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    D2: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program ``(token, block of heads)``: the first ``TURNED`` heads are rotated, the rest are copied.

    The first ``KEPT`` go to ``QUERY``, the next ``KV_HEADS`` to the keys, the others to the values.
    """
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, D2)
    inside = (head < count)[:, None] & (d < D)[None, :]
    partner = tl.where(d < HALF, d + HALF, tl.where(d < 2 * HALF, d - HALF, d))
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    cos = tl.load(COS + t * HALF + d % HALF, mask=d < 2 * HALF, other=1.0)
    sin = tl.load(SIN + t * HALF + d % HALF, mask=d < 2 * HALF, other=0.0)
    sin = tl.where(d < HALF, -sin, sin)
    source = HEADS + t * token_stride + head[:, None] * head_stride
    own = tl.load(source + d[None, :], mask=inside, other=0.0)
    other = tl.load(source + partner[None, :], mask=inside & (head < TURNED)[:, None], other=0.0)
    turned = tl.fma(other.to(tl.float32), sin[None, :], own.to(tl.float32) * cos[None, :]).to(own.dtype)
    result = tl.where((head < TURNED)[:, None], turned, own)
    tl.store(
        QUERY + (t * KEPT + head[:, None]) * D + d[None, :], result, mask=inside & (head < KEPT)[:, None]
    )
    if KV_HEADS > 0:
        slot = tl.load(SLOTS + t)
        key = head - KEPT
        place = (slot * KV_HEADS + key[:, None]) * D + d[None, :]
        tl.store(
            KEYS + place,
            stored(result, KEYS.dtype.element_ty),
            mask=inside & ((key >= 0) & (key < KV_HEADS))[:, None],
        )
        tl.store(
            VALUES + (place - KV_HEADS * D),
            stored(result, VALUES.dtype.element_ty),
            mask=inside & (key >= KV_HEADS)[:, None],
        )


def can_rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether a head's dimensions lie side by side, and cosine and sine are contiguous float32."""
    return (
        takes(heads)
        and heads.stride(2) == 1
        and cos.dtype is sin.dtype is torch.float32
        and cos.is_contiguous()
        and sin.is_contiguous()
    )


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    out = heads.new_empty(heads.shape)
    turn(heads, cos, sin, out, turned=heads.shape[1])
    return out


def turn(
    heads: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    query: torch.Tensor,
    *,
    turned: int,
    caches: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Rotate the first ``turned`` heads; ``query`` takes its own number of heads.

    ``caches``: keys, values and slots for those behind them.
    """
    tokens, count, dim = heads.shape
    if tokens == 0:
        return
    padded = triton.next_power_of_2(dim)
    block = min(triton.next_power_of_2(count), max(1, _ELEMENTS // padded))
    launch(
        rotate_heads,
        (tokens, triton.cdiv(count, block)),
        heads,
        cos,
        sin,
        query,
        *(caches or (query, query, query)),
        heads.stride(0),
        heads.stride(1),
        count,
        TURNED=turned,
        KEPT=query.shape[1],
        KV_HEADS=caches[0].shape[2] if caches else 0,
        D=dim,
        HALF=sin.shape[-1],
        D2=padded,
        BLOCK=block,
        num_warps=4,
    )
