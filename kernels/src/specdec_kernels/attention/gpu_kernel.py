"""Paged attention as one Triton kernel whose bits do not depend on how the work is divided.

Keys are taken in tiles of 64 slots. A tile gives the greatest score ``m`` of each query row, the sum
(``mass``) of the weights ``2 ** (score - m)`` as rounded to the model's dtype, and their product with the
values. Tiles are merged in ascending order into chunks, and chunks in ascending order into the result
(the online softmax of Milakov and Gimelshein, arXiv 1805.02867). Where a chunk ends is a matter of the
slot alone, and a tile of which a query sees nothing changes nothing, so it does not matter which other
queries stand beside it, nor whether one program goes through all chunks or each is another's (split along
the keys as in flash decoding): the merges are the same, in the same order.

The floor of a decode step is its keys and values, read once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

#: Slots of a tile.
TILE = tl.constexpr(64)
#: Tiles of a chunk, up to tile NEAR and behind it: long contexts have few partial results.
CHUNK = tl.constexpr(4)
NEAR = tl.constexpr(128)
FAR_CHUNK = tl.constexpr(32)

#: Who does what: one program all of a query tile's chunks, or several with a chunk or a tile at a time each.
SERIAL, BY_CHUNK, BY_TILE = 0, 1, 2
_SERIAL, _BY_CHUNK, _BY_TILE = tl.constexpr(SERIAL), tl.constexpr(BY_CHUNK), tl.constexpr(BY_TILE)
#: How query tiles lie: rows of equally many tokens, tiles listed one by one, or each token a tile.
UNIFORM, LISTED, SINGLE = 0, 1, 2
_UNIFORM, _LISTED = tl.constexpr(UNIFORM), tl.constexpr(LISTED)

_FAR_AWAY = tl.constexpr(1 << 30)
#: Slots asked for before the kernel in front has ended.
_PREFETCHED = tl.constexpr(128)


@triton.jit
def chunk_start(chunk):
    """First tile of a chunk."""
    return chunk * CHUNK + tl.maximum(chunk - NEAR // CHUNK, 0) * (FAR_CHUNK - CHUNK)


@triton.jit
def chunk_of(tile):
    """Chunk of a tile."""
    return tl.minimum(tile, NEAR) // CHUNK + tl.maximum(tile - NEAR, 0) // FAR_CHUNK


@triton.jit
def _merge(m, mass, acc, m_next, mass_next, acc_next):
    """Two neighbouring stretches of keys as one. An unseen one has ``m`` of -inf and changes no bit."""
    top = tl.maximum(m, m_next)
    finite = tl.where(top == -float("inf"), 0.0, top)
    a = tl.exp2(m - finite)
    b = tl.exp2(m_next - finite)
    return top, tl.fma(mass, a, mass_next * b), tl.fma(acc, a[:, None], acc_next * b[:, None])


@triton.jit
def _store_result(OUT, rows, columns, seen, mass, acc):
    """Weighted sums over the weights' sums; zero where nothing was seen."""
    inverse = 1.0 / tl.where(mass == 0.0, 1.0, mass)
    tl.store(OUT + rows[:, None] + columns[None, :], acc * inverse[:, None], mask=seen)


@triton.jit
def _slots(table, pos, wanted, block_size, BLOCK: tl.constexpr):
    """Physical slots of a row's logical ones."""
    if BLOCK == 0:
        return tl.load(table).to(tl.int32) * block_size + pos
    return tl.load(table + pos // BLOCK, mask=wanted, other=0).to(tl.int32) * BLOCK + pos % BLOCK


@triton.jit
def _prefetch(CACHE, at, wanted, BYTES: tl.constexpr):
    """Ask for ``BYTES`` from each address ``at`` into L2, which is coherent: nothing stale can come of it."""
    address = (CACHE + at).to(tl.pointer_type(tl.int8))
    size = tl.where(wanted, BYTES, 0)
    tl.inline_asm_elementwise(
        "{.reg .pred p; setp.gt.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;}",
        "=r,l,r",
        [address, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _level(EXTRA, token, live, entries, E: tl.constexpr):
    """How many levels of a tree each token sees, its own among them."""
    levels = tl.zeros_like(token)
    for e in tl.static_range(E):
        entry = tl.zeros_like(token) + e
        there = live & (entry < entries)
        slot = tl.load(EXTRA + token.to(tl.int64) * entries + entry, mask=there, other=-1)
        levels += (slot >= 0).to(tl.int32)
    return levels


@triton.jit
def _branch(
    BASE, POSITIONS, EXTRA, table, token, pos, end, entries, first, window, block_size,
    BLOCK: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Where a token's keys at ``pos`` are, and whether it sees them: from its base on those of its branch."""
    base = tl.load(BASE + token, cache_modifier=".cg").to(tl.int32)
    entry = pos - base
    branch = (entry >= 0) & (entry < entries)
    at_branch = EXTRA + token.to(tl.int64) * entries + entry
    slot = tl.where(branch, tl.load(at_branch, mask=branch, other=-1).to(tl.int32), pos)
    seen = ((pos < base) | branch) & (slot >= first) & (pos < end)
    if WINDOWED:
        position = tl.load(POSITIONS + token, cache_modifier=".cg").to(tl.int32)
        seen = seen & (pos > position - window)
    return _slots(table, slot, seen, block_size, BLOCK), seen


@triton.jit
def _read(x, DTYPE: tl.constexpr):
    """What a cache holds, in the dtype of the queries."""
    if tl.float8e4nv == x.dtype and tl.float32 == DTYPE:  # by bits, which the interpreter can do as well
        code = x.to(tl.uint8, bitcast=True).to(tl.int32)
        value = ((code & 0x80) << 24 | (code & 0x7F) << 20).to(tl.float32, bitcast=True)
        return tl.where((code & 0x7F) == 0x7F, float("nan"), value * 1.329227995784916e36)  # 2^120
    else:
        return x.to(DTYPE)


@triton.jit
def _tile(
    query, KEYS, VALUES, place, wanted, seen, dk, dv, ones, scale,
    DK: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Maximum, mass and weighted sum of the keys at physical places (times heads) ``place``."""
    keys = tl.load(
        KEYS + (place * DK)[:, None] + dk[None, :], mask=wanted[:, None] & (dk < DK)[None, :], other=0.0
    )
    values = tl.load(
        VALUES + (place * DV)[:, None] + dv[None, :], mask=wanted[:, None] & (dv < DV)[None, :], other=0.0
    )
    keys = _read(keys, query.dtype)
    values = _read(values, query.dtype)
    scores = tl.where(seen, tl.dot(query, tl.trans(keys), input_precision="ieee"), -float("inf"))
    # Scaled before the maximum: behind it, the product would be contracted with the difference in _merge.
    m = tl.max(scores * scale, 1)
    finite = tl.where(m == -float("inf"), 0.0, m)
    weights = tl.exp2(tl.fma(scores, scale, -finite[:, None])).to(query.dtype)
    # A sum as a product: its order is the instruction's, whatever the registers' layout.
    mass = tl.max(tl.dot(weights, ones, input_precision="ieee"), 1)
    return m, mass, tl.dot(weights, values, input_precision="ieee")


@triton.jit
def _reduce(
    PART_O, PART_M, PART_L, OUT, at, first_unit, last_unit, live, rows, valid, r, d,
    QR: tl.constexpr, DV2: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Merge the partial results ``first_unit..last_unit - 1`` of one query tile, whoever made them."""
    m = tl.full((QR,), -float("inf"), tl.float32)
    mass = tl.zeros((QR,), tl.float32)
    acc = tl.zeros((QR, DV2), tl.float32)
    # Four at a time are the tiles of a chunk in BY_TILE. What is asked for together is waited for once: as
    # much as there are registers for.
    CHUNKS: tl.constexpr = 3 if QR <= 4 else 2 if QR <= 8 else 1
    for start in range(first_unit // 4 * 4, last_unit, 4 * CHUNKS):
        for j in tl.static_range(4 * CHUNKS):
            if j % 4 == 0:
                m_chunk = tl.full((QR,), -float("inf"), tl.float32)
                mass_chunk = tl.zeros((QR,), tl.float32)
                acc_chunk = tl.zeros((QR, DV2), tl.float32)
            unit = tl.zeros_like(r) + (start + j)
            there = live & (unit >= first_unit) & (unit < last_unit)
            row = (at + unit) * QR + r
            # Written by other SMs: past L1, which knows nothing of them.
            m_unit = tl.load(PART_M + row, mask=there, other=-float("inf"), cache_modifier=".cg")
            mass_unit = tl.load(PART_L + row, mask=there, other=0.0, cache_modifier=".cg")
            acc_unit = tl.load(
                PART_O + row[:, None] * DV2 + d[None, :], mask=there[:, None], other=0.0, cache_modifier=".cg"
            )
            if MODE == _BY_TILE:
                m_chunk, mass_chunk, acc_chunk = _merge(
                    m_chunk, mass_chunk, acc_chunk, m_unit, mass_unit, acc_unit
                )
                if j % 4 == 3:
                    m, mass, acc = _merge(m, mass, acc, m_chunk, mass_chunk, acc_chunk)
            else:
                m, mass, acc = _merge(m, mass, acc, m_unit, mass_unit, acc_unit)
    _store_result(OUT, rows, d, valid, mass, acc)


@triton.jit(
    do_not_specialize=[
        "columns", "block_size", "max_slots", "first", "window", "entries", "tokens_per_row", "tiles_per_row",
        "units", "early",
    ]
)  # fmt: skip
def attend(
    QUERY, KEYS, VALUES, OUT, TABLE, BASE, POSITIONS, EXTRA, TILES, PART_O, PART_M, PART_L, ARRIVED,
    query_stride, columns, block_size, max_slots, first, window, entries, tokens_per_row, tiles_per_row,
    units, early, scale,
    LAYOUT: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    DK2: tl.constexpr, DV2: tl.constexpr, QM: tl.constexpr, QR: tl.constexpr, PER_TILE: tl.constexpr,
    BLOCK: tl.constexpr, E: tl.constexpr, WINDOWED: tl.constexpr, MODE: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program ``(query tile x KV head, p)``: units ``p, p + P, ...`` of the tile's keys, or all of them.

    A query tile is ``PER_TILE`` tokens of a row by the ``GROUP`` heads of a KV head. ``E``: tree slots a
    token has at most, as a power of two, 0 without trees. ``BLOCK``: slots of a block; 0 if the table has
    one column. ``scale`` holds log2(e). ``early``: nothing that tells where to read comes from the kernel
    right before.
    """
    pair = tl.program_id(0)
    p = tl.program_id(1)
    programs = tl.num_programs(1)
    head = pair % KV_HEADS
    q = pair // KV_HEADS
    dtype = KEYS.dtype.element_ty
    if PDL and early == 0:
        cuda.gdc_wait()

    # Which tokens, and from which slot to which they see.
    if LAYOUT == _UNIFORM:
        row = q // tiles_per_row
        skipped = (q % tiles_per_row) * PER_TILE
        token_begin = row * tokens_per_row + skipped
        count = tl.minimum(PER_TILE, tokens_per_row - skipped)
    elif LAYOUT == _LISTED:
        row = tl.load(TILES + 3 * q)
        token_begin = tl.load(TILES + 3 * q + 1)
        count = tl.load(TILES + 3 * q + 2)
    else:
        row = tl.load(TILES + q)
        token_begin = q
        count = 1
    table = TABLE + row.to(tl.int64) * columns
    r = tl.arange(0, QM)
    live = r // GROUP < count
    token = token_begin + r // GROUP
    base = tl.load(BASE + token, mask=live, other=0, cache_modifier=".cg").to(tl.int32)
    low = tl.zeros((QM,), tl.int32) + first
    if WINDOWED:
        position = tl.load(POSITIONS + token, mask=live, other=0, cache_modifier=".cg").to(tl.int32)
        low = tl.maximum(low, position - window + 1)
    begin = tl.min(tl.where(low < base, low, _FAR_AWAY), 0)
    end = tl.max(base, 0)
    tree_begin = _FAR_AWAY
    if E > 0:
        # A node's ancestors and itself are keys from place ``base`` on, wherever they are stored: they are
        # then summed where they would be if they were committed, and the bits are those of its path.
        levels = _level(EXTRA, token, live, entries, E)
        tree_begin = tl.min(tl.where(levels > 0, base, _FAR_AWAY), 0)
        begin = tl.minimum(begin, tl.min(tl.where(levels > 0, tl.maximum(low, 0), _FAR_AWAY), 0))
        end = tl.max(base + levels, 0)
    end = tl.minimum(end, max_slots)
    begin = tl.minimum(begin, end)
    tile = begin // TILE
    tiles = (end + TILE - 1) // TILE

    # Which of its units (tiles, or chunks of them) are this program's: ``length`` tiles in all.
    if MODE == _BY_TILE:
        first_unit = tile
        last_unit = tiles
        unit = first_unit + p
        tile = unit
        length = tl.maximum((last_unit - unit + programs - 1) // programs, 0)
        stop = tile + 1
    else:
        first_unit = chunk_of(tile)
        last_unit = tl.where(tiles > tile, chunk_of(tiles - 1) + 1, first_unit)
        unit = first_unit + p
        if MODE == _SERIAL:
            length = tiles - tile
            stop = tiles
        else:
            tile = chunk_start(unit)
            length = 0
            for u in range(unit, last_unit, programs):
                length += tl.minimum(chunk_start(u + 1), tiles) - chunk_start(u)
            stop = chunk_start(unit + 1)
    if MODE != _SERIAL:
        working = tl.maximum(tl.minimum(last_unit - first_unit, programs), 1)
        if p >= working:
            return

    if PDL:
        if (DK * dtype.primitive_bitwidth) % 128 == 0 and (DV * dtype.primitive_bitwidth) % 128 == 0:
            ahead = tile * TILE + tl.arange(0, _PREFETCHED)
            wanted = (ahead >= begin) & (ahead < tl.minimum(end, stop * TILE))
            there = _slots(table, ahead, wanted, block_size, BLOCK).to(tl.int64) * KV_HEADS + head
            _prefetch(KEYS, there * DK, wanted, DK * dtype.primitive_bitwidth // 8)
            _prefetch(VALUES, there * DV, wanted, DV * dtype.primitive_bitwidth // 8)
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()

    dk = tl.arange(0, DK2)
    dv = tl.arange(0, DV2)
    lane = head * GROUP + r % GROUP
    query = tl.load(
        QUERY + (token.to(tl.int64) * query_stride + lane * DK)[:, None] + dk[None, :],
        mask=live[:, None] & (dk < DK)[None, :],
        other=0.0,
    )
    ones = tl.full((TILE, 16), 1.0, QUERY.dtype.element_ty)
    at = pair * units
    m = tl.full((QM,), -float("inf"), tl.float32)
    mass = tl.zeros((QM,), tl.float32)
    acc = tl.zeros((QM, DV2), tl.float32)
    m_chunk = tl.full((QM,), -float("inf"), tl.float32)
    mass_chunk = tl.zeros((QM,), tl.float32)
    acc_chunk = tl.zeros((QM, DV2), tl.float32)
    step = programs if MODE == _BY_TILE else 1
    # Elsewhere loads of one tile are on their way while another is computed, and want to know where they go.
    ALONE: tl.constexpr = (E > 0 and PER_TILE == 1) and MODE == _BY_TILE
    for i in tl.range(0, length, num_stages=STAGES):
        # Where the loads read follows from i, or at least not from the branch below: they are pipelined.
        if MODE == _BY_CHUNK:
            here, chunk = tile, unit
            closing = (tile + 1 == chunk_start(unit + 1)) | (i == length - 1)
            unit = tl.where(closing, unit + programs, unit)
            tile = tl.where(closing, chunk_start(unit), tile + 1)
        else:
            here = tile + i * step
            chunk = chunk_of(here)
            closing = (here + 1 == chunk_start(chunk + 1)) | (i == length - 1)
        pos = here * TILE + tl.arange(0, TILE)
        if ALONE:  # a token's keys are the tile's, those of its branch too
            slots, inside = _branch(
                BASE, POSITIONS, EXTRA, table, token_begin, pos, end, entries, first, window, block_size,
                BLOCK, WINDOWED,
            )  # fmt: skip
            seen = inside[None, :] & live[:, None]
        else:
            inside = (pos >= begin) & (pos < end)
            slots = _slots(table, pos, inside, block_size, BLOCK)
            seen = (pos[None, :] >= low[:, None]) & (pos[None, :] < base[:, None])
        place = slots.to(tl.int64) * KV_HEADS + head
        m_tile, mass_tile, o_tile = _tile(
            query, KEYS, VALUES, place, inside, seen, dk, dv, ones, scale, DK, DV
        )  # fmt: skip
        if E > 0 and not ALONE:  # noqa: SIM102  one is known when it is compiled
            if here * TILE + TILE > tree_begin:
                # Each token has keys of its own here. Where the next one's are is asked for ahead.
                own_slots, own = _branch(
                    BASE, POSITIONS, EXTRA, table, token_begin, pos, end, entries, first, window, block_size,
                    BLOCK, WINDOWED,
                )  # fmt: skip
                for i in range(count):
                    next_slots, next_own = _branch(
                        BASE, POSITIONS, EXTRA, table, token_begin + tl.minimum(i + 1, count - 1), pos, end,
                        entries, first, window, block_size, BLOCK, WINDOWED,
                    )  # fmt: skip
                    own_place = own_slots.to(tl.int64) * KV_HEADS + head
                    m_own, mass_own, o_own = _tile(
                        query, KEYS, VALUES, own_place, own, own[None, :] & live[:, None], dk, dv, ones,
                        scale, DK, DV,
                    )  # fmt: skip
                    chosen = r // GROUP == i
                    m_tile = tl.where(chosen, m_own, m_tile)
                    mass_tile = tl.where(chosen, mass_own, mass_tile)
                    o_tile = tl.where(chosen[:, None], o_own, o_tile)
                    own_slots, own = next_slots, next_own
        if MODE == _BY_TILE:
            kept_at = (at + here) * QR + r
            kept = live & (r < QR)
            tl.store(PART_M + kept_at, m_tile, mask=kept)
            tl.store(PART_L + kept_at, mass_tile, mask=kept)
            tl.store(PART_O + kept_at[:, None] * DV2 + dv[None, :], o_tile, mask=kept[:, None])
        else:
            m_chunk, mass_chunk, acc_chunk = _merge(m_chunk, mass_chunk, acc_chunk, m_tile, mass_tile, o_tile)
            if closing:
                if MODE == _SERIAL:
                    m, mass, acc = _merge(m, mass, acc, m_chunk, mass_chunk, acc_chunk)
                else:
                    kept_at = (at + chunk) * QR + r
                    kept = live & (r < QR)
                    tl.store(PART_M + kept_at, m_chunk, mask=kept)
                    tl.store(PART_L + kept_at, mass_chunk, mask=kept)
                    tl.store(PART_O + kept_at[:, None] * DV2 + dv[None, :], acc_chunk, mask=kept[:, None])
                m_chunk = tl.full((QM,), -float("inf"), tl.float32)
                mass_chunk = tl.zeros((QM,), tl.float32)
                acc_chunk = tl.zeros((QM, DV2), tl.float32)

    result = token.to(tl.int64) * (KV_HEADS * GROUP * DV) + lane * DV
    if MODE == _SERIAL:
        _store_result(OUT, result, dv, live[:, None] & (dv < DV)[None, :], mass, acc)
    else:
        tl.debug_barrier()
        if tl.atomic_add(ARRIVED + pair, 1, sem="acq_rel") == working - 1:
            # The last one merges, and leaves the counter as it was found.
            rr = tl.arange(0, QR)
            here = rr // GROUP < count
            target = (token_begin + rr // GROUP).to(tl.int64) * (KV_HEADS * GROUP * DV)
            target += (head * GROUP + rr % GROUP) * DV
            _reduce(
                PART_O, PART_M, PART_L, OUT, at, first_unit, last_unit, here, target,
                here[:, None] & (dv < DV)[None, :], rr, dv, QR, DV2, MODE,
            )  # fmt: skip
            tl.store(ARRIVED + pair, 0)
