"""Mixtures of experts in Triton: which tiles, what is launched.

Five launches a layer: scores, choice, gate and up, down, sums; of more than 16 tokens grouping is one of its
own. All have sizes that the number of
tokens alone decides, so that they can be captured into a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton

from ..gpu import launch
from ..projection import Stream, tiles
from ..projection.tiles import Tile
from .gpu_kernel import combine_kernel, expert_down_kernel, expert_gate_up_kernel
from .gpu_routing import choose_kernel, group_kernel, router_kernel

#: Experts whose scores a program computes.
_SCORES = 16
#: Tokens that a program chooses for; so many at the most are grouped by it, too.
_FEW = 16
#: Choices that a program groups at one time, each compared with each.
_AT_ONCE = 128
#: Choices that a grouping program looks at at a time.
_CHOICES = 1024
#: Bytes of a weight row that are asked for before it is known for which tokens.
_PREFETCH = 1024
#: Tokens that go through at once: each holds float32 rows of all its experts' outputs meanwhile.
_TOKENS = 4096


def mix(
    x: torch.Tensor,
    logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    count: int,
    normalize: bool,
    activation: str,
) -> torch.Tensor:
    out = torch.empty_like(x)
    for own, part in _parts(Stream(x, x, None)):
        y = _outputs(part, logits[own], gate_up, down, 0.0, count, normalize, activation)
        _combine(y, count, out[own])
    return out


def add_experts(
    stream: Stream,
    router: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gain: torch.Tensor,
    *,
    eps: float,
    count: int,
    normalize: bool,
    activation: str,
) -> Stream:
    tokens, width = stream.residual.shape
    new = Stream.empty(tokens, width, stream.residual)
    assert new.squares is not None
    for own, part in _parts(stream):
        logits = scores(part, router, eps)
        y = _outputs(part, logits, gate_up, down, eps, count, normalize, activation)
        squares = new.squares[:, own.start :]
        _combine(y, count, new.residual[own], part.residual, gain, new.scaled[own], squares)
    return new


def expert_sums(
    stream: Stream,
    router: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    eps: float,
    count: int,
    normalize: bool,
    activation: str,
) -> torch.Tensor:
    out = torch.empty_like(stream.residual)
    for own, part in _parts(stream):
        logits = scores(part, router, eps)
        _combine(_outputs(part, logits, gate_up, down, eps, count, normalize, activation), count, out[own])
    return out


def _parts(stream: Stream) -> Iterator[tuple[slice, Stream]]:
    """Tokens that go through at once."""
    for begin in range(0, len(stream.residual), _TOKENS):
        own = slice(begin, begin + _TOKENS)
        squares = None if stream.squares is None else stream.squares[:, begin:]
        yield own, Stream(stream.residual[own], stream.scaled[own], squares)


def _combine(
    y: torch.Tensor,
    count: int,
    out: torch.Tensor,
    before: torch.Tensor | None = None,
    gain: torch.Tensor | None = None,
    scaled: torch.Tensor | None = None,
    squares: torch.Tensor | None = None,
) -> None:
    """A token's sum of its choices to ``out``; or behind ``before``, with the rest of a stream."""
    tokens, width = out.shape
    launch(
        combine_kernel,
        (tokens, -(-width // 1024)),
        *(y, before, gain, out, scaled, squares, 0 if squares is None else squares.stride(0)),
        H=width,
        COUNT=count,
        num_warps=4,
    )


def scores(stream: Stream, router: torch.Tensor, eps: float) -> torch.Tensor:
    """The router's logits of all experts: ``[T, E]`` float32."""
    x, (experts, inputs) = stream.scaled, router.shape
    tokens, squares = len(x), stream.squares
    logits = x.new_empty((tokens, experts), dtype=torch.float32)
    row_bytes = inputs * router.element_size()
    if tokens:
        tile = _fitted(Tile(_SCORES, (16 if tokens <= 16 else 64, 0), 128, 6, 4), x, inputs)
        launch(
            router_kernel,
            (-(-experts // _SCORES), -(-tokens // tile.tokens[0])),
            *(router, x, squares, 0 if squares is None else squares.stride(0), logits, tokens),
            *(row_bytes if row_bytes % 256 == 0 else 0, eps),
            E=experts,
            K=inputs,
            ROWS=_SCORES,
            B=tile.tokens[0],
            BK=tile.inputs,
            STAGES=tile.stages,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return logits


def choose(logits: torch.Tensor, count: int, *, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """As of :func:`specdec_kernels.experts.choose`, but for the ids' dtype, int32."""
    ids = logits.new_empty((len(logits), count), dtype=torch.int32)
    return ids, _choose(logits, count, normalize, ids, None, None)


def _choose(
    logits: torch.Tensor,
    count: int,
    normalize: bool,
    ids: torch.Tensor | None,
    order: torch.Tensor | None,
    found: torch.Tensor | None,
) -> torch.Tensor:
    """Weights; and either ``ids`` or, of up to :data:`_FEW` tokens, the groups are filled."""
    tokens, experts = logits.shape
    weights = logits.new_empty((tokens, count))
    if tokens:
        launch(
            choose_kernel,
            (-(-tokens // _FEW),),
            *(logits, ids, weights, order, found, tokens, 0 if found is None else len(found)),
            E=experts,
            COUNT=count,
            NORMALIZE=normalize,
            TOKENS=_FEW,
            BLOCK=triton.next_power_of_2(experts),
            SLOTS=triton.next_power_of_2(count),
            num_warps=8,
        )
    return weights


def chosen(
    logits: torch.Tensor, count: int, size: int, *, normalize: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights, and the choices in tiles of up to ``size`` rows, as of :func:`grouped`; few at one go."""
    tokens, experts = logits.shape
    if tokens > _FEW or _FEW * triton.next_power_of_2(count) > _AT_ONCE:
        ids, weights = choose(logits, count, normalize=normalize)
        return weights, *grouped(ids, experts, size)
    choices = tokens * count
    order = logits.new_empty(choices, dtype=torch.int32)
    found = logits.new_empty((min(choices, experts), 3), dtype=torch.int32)
    return _choose(logits, count, normalize, None, order, found), order, found


def grouped(ids: torch.Tensor, num_experts: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Choices by expert, and the tiles of up to ``size`` of them: ``ORDER`` and ``TILES`` of the kernel."""
    choices = ids.numel()
    touched = min(choices, num_experts)
    most = min(choices, (choices + touched * (size - 1)) // size)
    order = ids.new_empty(choices)
    found = ids.new_empty((most, 3))
    launch(
        group_kernel,
        (num_experts,),
        *(ids, order, found, choices, most),
        E=num_experts,
        B=size,
        BINS=triton.next_power_of_2(num_experts + 1),
        BLOCK=min(_CHOICES, max(128, triton.next_power_of_2(choices))),
        num_warps=4,
    )
    return order, found


def _outputs(
    stream: Stream,
    logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    eps: float,
    count: int,
    normalize: bool,
    activation: str,
) -> torch.Tensor:
    """``[T k, H]`` float32: what each choice gave, by token and rank, its weight in it."""
    x, squares = stream.scaled, stream.squares
    tokens, inputs = x.shape
    experts, width, inner = down.shape
    y = x.new_empty((tokens * count, width), dtype=torch.float32)
    if not tokens:
        return y
    size = rows_of_a_tile(tokens * count, experts, tokens, 64 if x.dtype is torch.float32 else 128)
    weights, order, found = chosen(logits, count, size, normalize=normalize)
    gated = x.new_empty(tokens * count, inner)
    tile = _tile(size, x, inputs)
    evict = "evict_first" if size == 16 else ""
    launch(
        expert_gate_up_kernel,
        (len(found) * -(-2 * inner // tile.rows),),
        *(gate_up, x, found, order, weights, squares, 0 if squares is None else squares.stride(0), gated),
        *(tokens, _ahead(gate_up), eps),
        N=inner,
        K=inputs,
        COUNT=count,
        GELU=activation == "gelu_tanh",
        **_constants(tile, evict),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    tile = _tile(size, x, inner)
    launch(
        expert_down_kernel,
        (len(found) * -(-width // tile.rows),),
        *(down, gated, found, order, y, _ahead(down)),
        N=width,
        K=inner,
        **_constants(tile, evict),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return y


def rows_of_a_tile(choices: int, experts: int, tokens: int, most: int) -> int:
    """Rows that a tile of an expert takes: some more than it has on the average, so that most take one."""
    mean = choices / experts
    for size in (16, 32, 64):
        if tokens <= size or 1.5 * mean <= size:
            return size
    return most


def _tile(size: int, x: torch.Tensor, inputs: int) -> Tile:
    if x.dtype is torch.float32:
        tile = Tile(64, (size, 0), 32, 2, 4)
    elif size <= 64:
        tile = Tile(64, (size, 0), 128, {16: 5, 32: 4, 64: 3}[size], 4)  # two programs fit on an SM
    else:
        tile = Tile(128, (size, 0), 64, 4, 8)
    return _fitted(tile, x, inputs)


def _ahead(weight: torch.Tensor) -> int:
    """Bytes of each row that are brought into L2 first; a copy in bulk wants multiples of 16, two a row."""
    row_bytes = weight.shape[-1] * weight.element_size()
    return min(_PREFETCH, row_bytes) // 32 * 32 if row_bytes % 16 == 0 else 0


def _fitted(tile: Tile, x: torch.Tensor, inputs: int) -> Tile:
    """With no more inputs than there are, and no more stages than fit."""
    bound = max(16, triton.next_power_of_2(inputs))
    tile = Tile(tile.rows, tile.tokens, min(tile.inputs, bound), tile.stages, tile.warps)
    if x.dtype is torch.float32:
        tile = Tile(tile.rows, tile.tokens, min(tile.inputs, 32), 2, tile.warps)
    return tiles.fitted(tile, x.element_size(), tiles.family(x.device.index)[1])


def _constants(tile: Tile, evict: str) -> dict[str, object]:
    return {
        "ROWS": tile.rows,
        "B": tile.tokens[0],
        "BK": tile.inputs,
        "STAGES": tile.stages,
        "EVICT": evict,
    }
