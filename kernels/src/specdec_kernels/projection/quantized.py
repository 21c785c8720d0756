"""The loop over the inputs for weights that stay quantised (:class:`~specdec_kernels.quantized.WordMatrix`).

A code becomes the bfloat16 of its value less its zero, which is exact, by bits alone: no conversion
instruction, two weights at a time. Each group's product is summed on its own, and added to the result by its
scale in float32. So weights are never rounded, and a row's bits depend on the order of the inputs alone, as
they do in :mod:`.mainloop`. The floor is the bytes of words and scales.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from ..gpu.sums import tree_sum
from ..quantized import BLOCK
from .mainloop import accumulate, last_loads

#: ``0x4300 | q`` is the bfloat16 128 + q, for q up to 127. $5: -(128 + zero), twice.
_INT4: tl.constexpr = tl.constexpr("""{
    .reg .b32 a, b, c, one;
    mov.b32 one, 0x3f803f80;
    shr.u32 a, $4, 4;
    shr.u32 b, $4, 8;
    shr.u32 c, $4, 12;
    lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 b, b, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 c, c, 0x000f000f, 0x43004300, 0xea;
    fma.rn.bf16x2 $1, a, one, $5;
    fma.rn.bf16x2 $2, b, one, $5;
    fma.rn.bf16x2 $3, c, one, $5;
    lop3.b32 a, $4, 0x000f000f, 0x43004300, 0xea;
    fma.rn.bf16x2 $0, a, one, $5;
}""")

#: The lower seven bits as above, the highest tells whether 128 or 256 goes off: q - 128.
_INT8: tl.constexpr = tl.constexpr("""{
    .reg .b32 h, a, b, c, d, less;
    mov.b32 less, 0xbf80bf80;
    shr.u32 h, $2, 8;
    lop3.b32 a, $2, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 b, $2, 0x00800080, 0x43804380, 0x6a;
    lop3.b32 c, h, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 d, h, 0x00800080, 0x43804380, 0x6a;
    fma.rn.bf16x2 $0, b, less, a;
    fma.rn.bf16x2 $1, d, less, c;
}""")

#: Sign, exponent and mantissa where bfloat16 has them; 2^120 makes up for the exponents' biases. The first
#: weight's stand there in the words already, the second's are a turn (whose sign comes from the neighbour)
#: and a shift away.
_FP8: tl.constexpr = tl.constexpr("""{
    .reg .b32 a, b, c, scale, zero;
    mov.b32 scale, 0x7b807b80;
    mov.b32 zero, 0x80008000;
    and.b32 a, $2, 0x87f087f0;
    shf.r.wrap.b32 b, $2, $2, 4;
    shl.b32 c, $2, 4;
    and.b32 b, b, 0x87808780;
    lop3.b32 b, c, 0x00700070, b, 0xea;
    fma.rn.bf16x2 $0, a, scale, zero;
    fma.rn.bf16x2 $1, b, scale, zero;
}""")


@triton.jit
def accumulate_words(
    W,
    PARAMS,
    X,
    rows,
    m,
    M,
    OUTPUTS: tl.constexpr,
    K: tl.constexpr,
    KIND: tl.constexpr,
    SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    BESIDE: tl.constexpr,
    ROWS: tl.constexpr,
    B0: tl.constexpr,
    B1: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    EVICT: tl.constexpr,
    PDL: tl.constexpr,
):
    """As :func:`~.mainloop.accumulate`, of words, in turns of ``BK`` inputs: of one block or several.

    ``OUTPUTS``: of all the weights: how far apart the groups' parameters lie. ``SIZE``: inputs that share
    one. ``SPLIT``: parts of the inputs that are summed on their own, then pairwise; ``BESIDE``: whether and
    how all at a time (:func:`~.tiles.beside`), else one behind the other.
    """
    if BESIDE == "batch":
        a0 = _batch(
            W, PARAMS, X, rows, m, M, OUTPUTS, K, KIND, SIZE, SPLIT, ROWS, B0, BK, STAGES, EVICT, PDL
        )  # fmt: skip
        return a0, a0
    elif BESIDE == "rows":
        a0 = _beside(
            W, PARAMS, X, rows, m, M, OUTPUTS, K, KIND, SIZE, SPLIT, ROWS, B0, BK, STAGES, EVICT, PDL
        )  # fmt: skip
        return a0, a0
    else:
        return _parts(
            W, PARAMS, X, rows, m, M, OUTPUTS, K, KIND, SIZE, SPLIT, 0, SPLIT, ROWS, B0, B1, BK, STAGES,
            EVICT, PDL,
        )  # fmt: skip


@triton.jit
def _parts(
    W, PARAMS, X, rows, m, M,
    OUTPUTS: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, SIZE: tl.constexpr, SPLIT: tl.constexpr,
    FIRST: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr, B0: tl.constexpr, B1: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr, EVICT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``COUNT`` parts from ``FIRST`` on, pairwise."""
    if COUNT > 1:
        HALF: tl.constexpr = COUNT // 2
        a0, a1 = _parts(
            W, PARAMS, X, rows, m, M, OUTPUTS, K, KIND, SIZE, SPLIT, FIRST, HALF, ROWS, B0, B1, BK, STAGES,
            EVICT, PDL,
        )  # fmt: skip
        b0, b1 = _parts(
            W, PARAMS, X, rows, m, M, OUTPUTS, K, KIND, SIZE, SPLIT, FIRST + HALF, HALF, ROWS, B0, B1, BK,
            STAGES, EVICT, PDL,
        )  # fmt: skip
        return a0 + b0, a1 + b1
    else:
        return _part(
            W, PARAMS, X, rows, m, M, OUTPUTS, K, KIND, SIZE, SPLIT, FIRST, ROWS, B0, B1, BK, STAGES, EVICT,
            PDL
        )  # fmt: skip


@triton.jit
def _part(
    W, PARAMS, X, rows, m, M,
    OUTPUTS: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, SIZE: tl.constexpr, SPLIT: tl.constexpr,
    FIRST: tl.constexpr, ROWS: tl.constexpr, B0: tl.constexpr, B1: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, EVICT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Part ``FIRST`` of the inputs."""
    WORDS: tl.constexpr = _words(KIND)
    PLANES: tl.constexpr = 4 if KIND == "int4" else 2
    BLOCK: tl.constexpr = WORDS * PLANES
    PADDED: tl.constexpr = (K + BLOCK - 1) // BLOCK * BLOCK
    LENGTH: tl.constexpr = PADDED // SPLIT
    # a group, or as much of it as lies in a block, is summed before it is scaled
    PART: tl.constexpr = SIZE if SIZE < BLOCK and SIZE < K else BLOCK
    WARPS: tl.constexpr = cuda.num_warps() if tl.bfloat16 == X.dtype.element_ty else 1
    CHUNK: tl.constexpr = _at_a_time(WORDS, PART, ROWS, WARPS)
    w = W + rows.to(tl.int64)[:, None] * (PADDED // PLANES) + tl.arange(0, WORDS)[None, :]
    j = tl.arange(0, CHUNK)
    m0 = m + tl.arange(0, B0)
    x0 = X + m0.to(tl.int64)[None, :] * K + j[:, None]
    a0 = tl.zeros((ROWS, B0), tl.float32)
    p0 = tl.zeros((ROWS, B0), tl.float32)
    a1 = a0
    p1 = p0
    if B1 > 0:
        m1 = m + B0 + tl.arange(0, B1)
        x1 = X + m1.to(tl.int64)[None, :] * K + j[:, None]
        a1 = tl.zeros((ROWS, B1), tl.float32)
        p1 = tl.zeros((ROWS, B1), tl.float32)
    if SIZE == K:  # one for all inputs
        scale, zero = _parameters(PARAMS + rows, KIND)
    LAST: tl.constexpr = last_loads(PADDED, BK, STAGES)
    for k in tl.range(FIRST * LENGTH, (FIRST + 1) * LENGTH, BK, num_stages=STAGES):
        for block in tl.static_range(0, BK, BLOCK):
            words = tl.load(w + (k + block) // PLANES, eviction_policy=EVICT)
            for part in tl.static_range(block, block + BLOCK, PART):
                if SIZE < K:
                    group = _group(k + part, K, SIZE, PADDED)
                    scale, zero = _parameters(PARAMS + group * OUTPUTS + rows, KIND)
                    p0 = tl.zeros((ROWS, B0), tl.float32)
                    if B1 > 0:
                        p1 = tl.zeros((ROWS, B1), tl.float32)
                values = _decoded(words, zero, KIND, X.dtype.element_ty)
                for at in tl.static_range(part, part + PART, CHUNK):
                    weight = _joined(values, at % BLOCK // WORDS, CHUNK // WORDS, ROWS, WORDS)
                    x = _tokens(x0 + k + at, m0, M, k + at + j, K, PADDED)
                    p0 = tl.dot(weight, x, p0, input_precision="ieee")
                    if B1 > 0:
                        y = _tokens(x1 + k + at, m1, M, k + at + j, K, PADDED)
                        p1 = tl.dot(weight, y, p1, input_precision="ieee")
                if SIZE < K:
                    a0 = tl.fma(p0, scale[:, None], a0)
                    if B1 > 0:
                        a1 = tl.fma(p1, scale[:, None], a1)
        if SIZE == K:
            p0 = _settled(p0, X.dtype.element_ty)
            if B1 > 0:
                p1 = _settled(p1, X.dtype.element_ty)
        if PDL:  # noqa: SIM102  one is known when it is compiled
            if k == LAST:
                cuda.gdc_launch_dependents()
    if SIZE == K:
        a0 = _scaled(p0, scale)
        if B1 > 0:
            a1 = _scaled(p1, scale)
    if B1 > 0:
        return a0, a1
    else:
        return a0, a0


@triton.jit
def _beside(
    W, PARAMS, X, rows, m, M,
    OUTPUTS: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, SIZE: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, B: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, EVICT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """All parts at a time, as rows of one tile: each is multiplied by the tokens of all, and its own are
    kept.

    A tensor core has the time for it, and a matrix of few outputs gets as many warps as decoding its words
    takes.
    """
    WORDS: tl.constexpr = _words(KIND)
    PLANES: tl.constexpr = 4 if KIND == "int4" else 2
    BLOCK: tl.constexpr = WORDS * PLANES
    PADDED: tl.constexpr = (K + BLOCK - 1) // BLOCK * BLOCK
    LENGTH: tl.constexpr = PADDED // SPLIT
    PART: tl.constexpr = SIZE if SIZE < BLOCK and SIZE < K else BLOCK
    TALL: tl.constexpr = ROWS * SPLIT
    WIDE: tl.constexpr = B * SPLIT
    WARPS: tl.constexpr = cuda.num_warps() if tl.bfloat16 == X.dtype.element_ty else 1
    CHUNK: tl.constexpr = _at_a_time(WORDS, PART, TALL, WARPS)
    rows = tl.reshape(tl.broadcast_to(rows[:, None], (ROWS, SPLIT)), (TALL,))
    begin = tl.arange(0, TALL) % SPLIT * LENGTH
    w = W + (rows.to(tl.int64) * (PADDED // PLANES) + begin // PLANES)[:, None] + tl.arange(0, WORDS)[None, :]
    j = tl.arange(0, CHUNK)
    other = tl.arange(0, WIDE) // B * LENGTH
    token = m + tl.arange(0, WIDE) % B
    x0 = X + (token.to(tl.int64) * K + other)[None, :] + j[:, None]
    a = tl.zeros((TALL, WIDE), tl.float32)
    p = tl.zeros((TALL, WIDE), tl.float32)
    if SIZE == K:
        scale, zero = _parameters(PARAMS + rows, KIND)
    LAST: tl.constexpr = last_loads(LENGTH, BK, STAGES)
    for k in tl.range(0, LENGTH, BK, num_stages=STAGES):
        for block in tl.static_range(0, BK, BLOCK):
            words = tl.load(w + (k + block) // PLANES, eviction_policy=EVICT)
            for part in tl.static_range(block, block + BLOCK, PART):
                if SIZE < K:
                    group = _group(begin + k + part, K, SIZE, PADDED)
                    scale, zero = _parameters(PARAMS + group * OUTPUTS + rows, KIND)
                    p = tl.zeros((TALL, WIDE), tl.float32)
                values = _decoded(words, zero, KIND, X.dtype.element_ty)
                for at in tl.static_range(part, part + PART, CHUNK):
                    weight = _joined(values, at % BLOCK // WORDS, CHUNK // WORDS, TALL, WORDS)
                    if K == PADDED:
                        x = tl.load(x0 + k + at, mask=(token < M)[None, :], other=0.0)
                    else:
                        inside = other[None, :] + (k + at + j)[:, None] < K
                        x = tl.load(x0 + k + at, mask=(token < M)[None, :] & inside, other=0.0)
                    p = tl.dot(weight, x, p, input_precision="ieee")
                if SIZE < K:
                    a = tl.fma(p, scale[:, None], a)
        if SIZE == K:
            p = _settled(p, X.dtype.element_ty)
        if PDL:  # noqa: SIM102  one is known when it is compiled
            if k == LAST:
                cuda.gdc_launch_dependents()
    if SIZE == K:
        a = _scaled(p, scale)
    own = begin[:, None] == other[None, :]
    kept = tl.sum(tl.reshape(tl.where(own, a, 0.0), (TALL, SPLIT, B)), 1)  # zeros beside it, in any order
    return tree_sum(kept, TALL, B, SPLIT)


@triton.jit
def _batch(
    W, PARAMS, X, rows, m, M,
    OUTPUTS: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, SIZE: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, B: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, EVICT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """All parts at a time, as a batch of products: a warp each, by ``mma.sync``.

    That multiplies nothing but a part's own tokens, and from registers that are free once it was issued: a
    warp decodes while the tensor core multiplies, and waits for no other warp's products.
    """
    WORDS: tl.constexpr = _words(KIND)
    PLANES: tl.constexpr = 4 if KIND == "int4" else 2
    BLOCK: tl.constexpr = WORDS * PLANES
    PADDED: tl.constexpr = (K + BLOCK - 1) // BLOCK * BLOCK
    LENGTH: tl.constexpr = PADDED // SPLIT
    PART: tl.constexpr = SIZE if SIZE < BLOCK and SIZE < K else BLOCK
    j = tl.arange(0, WORDS)
    begin = tl.arange(0, SPLIT)[:, None] * LENGTH
    rows = rows[None, :]
    w = W + (rows.to(tl.int64) * (PADDED // PLANES) + begin // PLANES)[:, :, None] + j[None, None, :]
    inputs = begin + j[None, :]
    token = m + tl.arange(0, B)
    there = (token < M)[None, None, :]
    x0 = X + inputs[:, :, None] + (token.to(tl.int64) * K)[None, None, :]
    a = tl.zeros((SPLIT, ROWS, B), tl.float32)
    p = tl.zeros((SPLIT, ROWS, B), tl.float32)
    if SIZE == K:
        scale, zero = _parameters(PARAMS + tl.broadcast_to(rows, (SPLIT, ROWS)), KIND)
    LAST: tl.constexpr = last_loads(LENGTH, BK, STAGES)
    for k in tl.range(0, LENGTH, BK, num_stages=STAGES):
        for block in tl.static_range(0, BK, BLOCK):
            words = tl.load(w + (k + block) // PLANES, eviction_policy=EVICT)
            for part in tl.static_range(block, block + BLOCK, PART):
                if SIZE < K:
                    group = _group(begin + k + part, K, SIZE, PADDED)
                    scale, zero = _parameters(PARAMS + group * OUTPUTS + rows, KIND)
                    p = tl.zeros((SPLIT, ROWS, B), tl.float32)
                values = _decoded(words, zero, KIND, X.dtype.element_ty)
                for at in tl.static_range(part, part + PART, WORDS):
                    if K == PADDED:
                        x = tl.load(x0 + k + at, mask=there, other=0.0)
                    else:
                        inside = (inputs + k + at < K)[:, :, None]
                        x = tl.load(x0 + k + at, mask=there & inside, other=0.0)
                    p = tl.dot(values[at % BLOCK // WORDS], x, p, input_precision="ieee")
                if SIZE < K:
                    a = tl.fma(p, scale[:, :, None], a)
        if PDL:  # noqa: SIM102  one is known when it is compiled
            if k == LAST:
                cuda.gdc_launch_dependents()
    if SIZE == K:
        a = _scaled(p, scale)
    return _added(a, SPLIT, ROWS, B)


@triton.jit
def _added(a, COUNT: tl.constexpr, ROWS: tl.constexpr, B: tl.constexpr):
    """``[COUNT, ROWS, B]``, pairwise as :func:`_parts` adds them: ``[ROWS, B]``."""
    if COUNT == 1:
        return tl.reshape(a, (ROWS, B))
    else:
        HALF: tl.constexpr = COUNT // 2
        even, odd = tl.split(tl.permute(tl.reshape(a, (HALF, 2, ROWS, B)), (0, 2, 3, 1)))
        return _added(even + odd, HALF, ROWS, B)


@triton.jit
def _settled(p, DTYPE: tl.constexpr):
    """``p``, once the tensor cores are done with it; no instruction.

    A use of sums that stay in the tensor cores' hands from one block to the next, so that Triton waits for
    them: else the next block is decoded into the registers from which the last product is still being read.
    """
    if tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=f,f", [p], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return p


@triton.jit
def _scaled(p, scale):
    """Sums by the scale of all their inputs, rounded: a plain product would be contracted with what is added
    to it where that is in the same thread, so in some tiles and not in others.
    """
    return tl.fma(p, tl.expand_dims(scale, -1), tl.zeros_like(p))


@triton.constexpr_function
def _words(kind: str) -> int:
    """Words of a block."""
    return BLOCK // (4 if kind == "int4" else 2)


@triton.constexpr_function
def _at_a_time(words: int, part: int, rows: int, warps: int) -> int:
    """Inputs of one product: half a block where Triton takes ``wgmma``, since it waits for each of those;
    the other half may be decoded meanwhile.

    Else as many as a word of each row; of more, ``mma.sync`` would get the inputs in another order.
    """
    return min(part, BLOCK // 2) if rows % 64 == 0 and warps % 4 == 0 else words


@triton.jit
def _joined(values, FIRST: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Tiles from ``FIRST`` on, side by side; they stay in their registers."""
    if COUNT == 1:
        return values[FIRST]
    else:
        HALF: tl.constexpr = COUNT // 2
        one = _joined(values, FIRST, HALF, ROWS, WORDS)
        other = _joined(values, FIRST + HALF, HALF, ROWS, WORDS)
        return tl.reshape(tl.permute(tl.join(one, other), (0, 2, 1)), (ROWS, COUNT * WORDS))


@triton.jit
def _tokens(x, m, M, k, K: tl.constexpr, PADDED: tl.constexpr):
    if K == PADDED:
        return tl.load(x, mask=(m < M)[None, :], other=0.0)
    else:
        return tl.load(x, mask=(m < M)[None, :] & (k < K)[:, None], other=0.0)


@triton.jit
def _group(k, K: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr):
    if K == PADDED:
        return k // SIZE
    else:  # behind the last input there are none
        return tl.minimum(k // SIZE, K // SIZE - 1)


@triton.jit
def _parameters(at, KIND: tl.constexpr):
    """Scales of some rows, and what :func:`_decoded` takes off: the bits of -(128 + zero) in bfloat16."""
    word = tl.load(at)
    if KIND == "int4":
        scale = (word & -256).to(tl.float32, bitcast=True)
        return scale, ((word & 0x7F) | -0x3D00).to(tl.int16)
    else:
        return word, word


@triton.jit
def _decoded(words, zero, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """The values of a block of words, a tile for each weight of a word: ``[ROWS, WORDS]``."""
    if tl.bfloat16 == DTYPE:
        if KIND == "int4":
            values = tl.inline_asm_elementwise(
                _INT4, "=&r,=&r,=&r,=&r,r,r", [words, tl.expand_dims(zero, -1)],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
            )  # fmt: skip
        elif KIND == "int8":
            values = tl.inline_asm_elementwise(
                _INT8, "=&r,=&r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
            )
        else:
            values = tl.inline_asm_elementwise(
                _FP8, "=&r,=&r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
            )
        return values
    else:
        wide = words.to(tl.int32)
        if KIND == "int4":
            less = tl.expand_dims((zero.to(tl.int32) & 0x7F).to(tl.float32), -1)
            return (
                (wide & 15).to(tl.float32) - less,
                (wide >> 4 & 15).to(tl.float32) - less,
                (wide >> 8 & 15).to(tl.float32) - less,
                (wide >> 12 & 15).to(tl.float32) - less,
            )
        elif KIND == "int8":
            return (wide & 255).to(tl.float32) - 128.0, (wide >> 8 & 255).to(tl.float32) - 128.0
        else:
            second = (wide & 7) | (wide >> 8 & 0x78) | (_swapped(wide) << 4 & 0x80)
            return _float8((wide >> 8 & 0x80) | (wide >> 4 & 0x7F)), _float8(second)


@triton.jit
def _swapped(words):
    """Each word's neighbour: the second's of the first, and the first's of the second."""
    PAIRS: tl.constexpr = words.numel // 2
    first, second = tl.split(tl.reshape(words, (PAIRS, 2)))
    return tl.reshape(tl.join(second, first), words.shape)


@triton.jit
def _float8(code):
    bits = (code & 0x80) << 24 | (code & 0x7F) << 20
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
def multiply(
    W,
    PARAMS,
    X,
    WB,
    XB0,
    XB1,
    n,
    rows,
    m,
    M,
    OUTPUTS: tl.constexpr,
    K: tl.constexpr,
    KIND: tl.constexpr,
    SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    BESIDE: tl.constexpr,
    ROWS: tl.constexpr,
    B0: tl.constexpr,
    B1: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    EVICT: tl.constexpr,
    PDL: tl.constexpr,
):
    """:func:`accumulate_words` where there are parameters of words, else :func:`~.mainloop.accumulate`."""
    if PARAMS is not None:
        return accumulate_words(
            W, PARAMS, X, rows, m, M, OUTPUTS, K, KIND, SIZE, SPLIT, BESIDE, ROWS, B0, B1, BK, STAGES, EVICT,
            PDL,
        )  # fmt: skip
    else:
        return accumulate(W, X, WB, XB0, XB1, n, rows, m, M, K, ROWS, B0, B1, BK, STAGES, EVICT, PDL)
