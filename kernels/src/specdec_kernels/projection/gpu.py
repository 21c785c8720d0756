"""The fused products in Triton: which tile, what is launched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton

from ..gpu import launch
from ..quantized import WordMatrix
from ..ranks import Mail
from . import tiles
from .between import add_terms_kernel, embed_kernel, gather_kernel, join_kernel, normalize_kernel
from .boxes import boxes
from .fused import add_kernel, gate_up_kernel, product_kernel
from .heads import qkv_kernel
from .stream import COLUMNS, Stream
from .tiles import Tile

Weight = torch.Tensor | WordMatrix

#: Tiles of tokens that are gone through together, for the L2 cache.
_GROUP = 8
_COLUMNS = 1024
#: Tensors that one launch gathers from.
_GATHERED = 4


def embed(ids: torch.Tensor, table: torch.Tensor, gain: torch.Tensor) -> Stream:
    tokens, width = len(ids), table.shape[1]
    stream = Stream.empty(tokens, width, table)
    if tokens:
        parts = (stream.residual, stream.scaled, *_squares(stream))
        grid = (tokens, -(-width // _COLUMNS))
        launch(embed_kernel, grid, ids, table, gain, *parts, H=width, num_warps=4)
    return stream


def join(
    ids: torch.Tensor,
    table: torch.Tensor,
    features: torch.Tensor,
    *,
    table_gain: torch.Tensor | None,
    feature_gain: torch.Tensor | None,
    eps: float,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    tokens, embedded, width = len(ids), table.shape[1], features.shape[1]
    y = table.new_empty(tokens, embedded + width)
    if tokens:
        launch(
            join_kernel,
            (tokens, 2),
            *(ids, table, table_gain, features.contiguous(), feature_gain, rows, y, eps),
            E=embedded,
            H=width,
            BLOCK=triton.next_power_of_2(max(embedded, width)),
            num_warps=8,
        )
    return y


def gather(parts: Sequence[torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    tokens, width = len(rows), parts[0].shape[1]
    y = parts[0].new_empty(tokens, len(parts) * width)
    for first in range(0, len(parts) if tokens else 0, _GATHERED):
        some = [*(part.contiguous() for part in parts[first : first + _GATHERED]), *[None] * _GATHERED]
        some = some[:_GATHERED]
        count = sum(part is not None for part in some)
        launch(
            gather_kernel,
            (tokens, -(-width // _COLUMNS), count),
            *(*some, rows, y[:, first * width :], y.stride(0)),
            H=width,
            BLOCK=_COLUMNS,
            num_warps=4,
        )
    return y


def project_qkv(
    stream: Stream,
    weight: Weight,
    bias: torch.Tensor | None,
    *,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    write_slots: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    query_gain: torch.Tensor | None,
    key_gain: torch.Tensor | None,
    rotate: bool,
    delta: torch.Tensor | None = None,
) -> torch.Tensor:
    x = _ordered(stream.scaled, weight)
    tokens = x.shape[0]
    kv_heads, dim = key_cache.shape[2:]
    heads = weight.shape[0] // dim
    query = x.new_empty(tokens, heads - 2 * kv_heads, dim)
    if not tokens:
        return query
    pairs, held = dim // 2, 1
    if query_gain is not None:  # a tile holds whole heads
        pairs = 1 << (pairs - 1).bit_length()
        held = 2 * pairs
    tile = _tile("qkv", x, weight, held)
    _launch(
        qkv_kernel,
        *(tile, 2 * heads * pairs, weight, x, bias, delta, *_squares(stream)),
        *(cos, sin, positions, write_slots, query_gain, key_gain, query, key_cache, value_cache),
        scalars=(eps,),
        pairs=pairs if 2 * pairs == dim and (not rotate or 2 * cos.shape[1] == dim) else None,
        K=x.shape[1],
        HQ=heads - 2 * kv_heads,
        HKV=kv_heads,
        D=dim,
        ROTATED=cos.shape[1] if rotate else 0,
        PAIRS=pairs,
        COLUMNS=stream.columns,
    )
    return query


def project_gate_up(
    stream: Stream,
    weight: Weight,
    bias: torch.Tensor | None,
    *,
    eps: float,
    activation: str,
    delta: torch.Tensor | None = None,
) -> torch.Tensor:
    x = _ordered(stream.scaled, weight)
    tokens, size = x.shape[0], weight.shape[0] // 2
    y = x.new_empty(tokens, size)
    if tokens:
        _launch(
            gate_up_kernel,
            *(_tile("gate_up", x, weight), 2 * size, weight, x, bias, delta),
            *_squares(stream),
            y,
            scalars=(eps,),
            pairs=size,
            N=size,
            K=x.shape[1],
            GELU=activation == "gelu_tanh",
            COLUMNS=stream.columns,
        )
    return y


def add_product(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None,
    stream: Stream,
    gain: torch.Tensor,
    *,
    delta: torch.Tensor | None = None,
    mail: Mail | None = None,
) -> Stream:
    x = _ordered(x, weight)
    tokens = x.shape[0]
    width, inputs = weight.shape
    new = Stream.empty(tokens, width, stream.residual, tiles.columns_of(weight))
    if tokens:
        _launch(
            add_kernel,
            *(_tile("add", x, weight), width, weight, x, bias, delta, stream.residual.contiguous(), gain),
            *(new.residual, new.scaled, *_squares(new), None if mail is None else mail.state),
            N=width,
            K=inputs,
            COLUMNS=new.columns,
            RANKS=1 if mail is None else mail.ranks,
            WORDS=0 if mail is None else mail.words,
        )
    return new


def add(
    terms: torch.Tensor, stream: Stream | None, gain: torch.Tensor, weight: Weight | None = None
) -> Stream:
    count, tokens, width = terms.shape
    columns = COLUMNS if weight is None else tiles.columns_of(weight)
    new = Stream.empty(tokens, width, terms, columns)
    if tokens:
        terms = terms.contiguous()
        residual = None if stream is None else stream.residual.contiguous()
        parts = (residual, gain, new.residual, new.scaled, *_squares(new))
        grid = (tokens, -(-width // _COLUMNS))
        launch(
            add_terms_kernel,
            grid,
            *(terms, tokens * width, *parts),
            COUNT=count,
            H=width,
            COLUMNS=columns,
            num_warps=4,
        )
    return new


def normalize(
    stream: Stream, gain: torch.Tensor, eps: float, rows: torch.Tensor | None = None
) -> torch.Tensor:
    tokens, width = stream.residual.shape
    tokens = tokens if rows is None else len(rows)
    y = stream.residual.new_empty(tokens, width)
    if tokens:
        grid = (tokens, -(-width // _COLUMNS))
        parts = (stream.residual.contiguous(), gain, *_squares(stream), rows, y, eps)
        launch(normalize_kernel, grid, *parts, H=width, COLUMNS=stream.columns, BLOCK=_COLUMNS, num_warps=4)
    return y


def product(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, delta: torch.Tensor | None = None
) -> torch.Tensor:
    x = _ordered(x, weight)
    tokens = x.shape[0]
    outputs, inputs = weight.shape
    y = x.new_empty(tokens, outputs)
    if tokens:
        tile = _tile("product", x, weight)
        _launch(product_kernel, tile, outputs, weight, x, bias, delta, y, N=outputs, K=inputs)
    return y


def _squares(stream: Stream) -> tuple[torch.Tensor | None, int]:
    """The partial sums and their stride."""
    return stream.squares, 0 if stream.squares is None else stream.squares.stride(0)


def _ordered(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Inputs in the order of the weight's columns, a token behind the other: kernels read by address."""
    if isinstance(weight, torch.Tensor) or weight.order is None:
        return x.contiguous()
    return x.index_select(1, weight.order)


def _tile(kind: str, x: torch.Tensor, weight: Weight, held: int = 1) -> Tile:
    name, shared = tiles.family(x.device.index)
    bound = tiles.token_class(x.shape[0])
    if isinstance(weight, torch.Tensor):
        tile = tiles.choose(kind, x.dtype, name, *weight.shape, bound)
        return tiles.fitted(tile, x.element_size(), shared, rows=held)
    tile = tiles.choose(kind, x.dtype, name, *weight.shape, bound, weight.label, tiles.parts_of(weight))
    return tiles.fitted(tile, x.element_size(), shared, rows=held, words=weight)


def _launch(
    kernel: Any,
    tile: Tile,
    rows: int,
    weight: Weight,
    x: torch.Tensor,
    *tensors: Any,
    scalars: tuple[float, ...] = (),
    pairs: int | None = 0,
    **constants: Any,
) -> None:
    """Launch a product whose tiles cover ``rows`` weight rows and all tokens.

    ``pairs``: as of :func:`boxes`; None: the tiles' rows cannot be had in boxes.
    """
    how: dict[str, Any]
    if isinstance(weight, WordMatrix):
        stored, params = weight.words, weight.params
        parts = tiles.parts_of(weight)
        how = {"KIND": weight.kind, "SIZE": weight.group, "SPLIT": parts, "BESIDE": tiles.beside(tile, parts)}
        by = None
    else:
        stored, params = weight, None
        how = {"KIND": "", "SIZE": 0, "SPLIT": 1, "BESIDE": ""}
        by = boxes(weight, x, tile, pairs) if tile.boxes and pairs is not None else None
    row_bytes = stored.shape[1] * stored.element_size()
    # a copy in bulk wants multiples of 16 bytes; several threads share the row of a low tile, or one in parts
    unit = 16 * max(2, 128 // tile.rows, how["SPLIT"])
    ahead = min(tile.prefetch, row_bytes) // unit * unit if row_bytes % 16 == 0 else 0
    columns = -(-x.shape[0] // sum(tile.tokens))
    launch(
        kernel,
        (-(-rows // tile.rows) * columns,),
        *(stored, x, *(by or (None, None, None)), params, *tensors, x.shape[0], ahead, *scalars),
        **constants,
        **how,
        ROWS=tile.rows,
        B0=tile.tokens[0],
        B1=tile.tokens[1],
        BK=tile.inputs,
        STAGES=tile.stages,
        GROUP=_GROUP,
        # weights that no other program reads make room for what is read again
        EVICT="evict_first" if columns == 1 else "",
        EARLY=tile.early,
        WIDTH=stored.shape[1],
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
