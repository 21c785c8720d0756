"""Tiles that ``tune.py`` tries."""

from __future__ import annotations

from dataclasses import replace

from specdec_kernels.projection.tiles import Tile
from specdec_kernels.quantized import BLOCK as WORD_BLOCK

#: Shared memory that a program may have on Hopper.
SHARED = 232448


def candidates_of_words(bound: int, parts: int, *, quick: bool) -> list[Tile]:
    """Of weights that stay quantised: those that ought to be good come first.

    Two warps, and parts as a batch, multiply by ``mma.sync``: a warp decodes the next weights meanwhile.
    Turns of two blocks take fewer instructions a weight. Few stages let more programs onto an SM, of which
    one decodes while another waits.
    """
    found = []
    own = [(bound, 0)] if bound in (16, 32) else [(32, 0), (64, 0)] if bound <= 64 else [(64, 0), (128, 0)]
    for tokens in own:

        def some(rows: int, inputs: int, warps: int, *stages: int, batch: bool = False) -> list[Tile]:
            return [Tile(rows, tokens, inputs, count, warps, batch=batch) for count in stages]  # noqa: B023

        two, one = 2 * WORD_BLOCK, WORD_BLOCK
        if bound <= 64 and parts > 1:
            found += some(32, two, 4, 3, 4, batch=True) + some(32, one, 4, 4, 6, batch=True)
            if parts >= 8:  # a warp each
                found += some(32, one, 8, 2, 3, 4, batch=True)
            found += some(32, two, 8, 2, 3) + some(32, one, 8, 3, 4)
            if bound <= 32:  # tokens are read once for more rows
                found += some(64, one, 4, 3, 4, batch=True)
            if bound == 16:  # of more tokens its products do not go into registers
                found += some(64, two, 4, 2, batch=True)
            if not quick:
                found += some(32, two, 4, 2, batch=True) + some(32, one, 4, 3, 8, batch=True)
                found += some(64, one, 8, 2, 3) + some(32, one, 4, 3, 5) + some(64, one, 4, 4, 6)
        elif bound <= 64:
            found += some(64, two, 2, 3, 4) + some(128, two, 4, 3, 4) + some(64, two, 4, 3)
            found += some(64, one, 2, 4, 6) + some(128, one, 4, 4) + some(64, one, 4, 4, 6)
            if not quick:
                found += some(128, two, 4, 2) + some(64, two, 2, 2) + some(64, one, 2, 3)
                found += some(128, one, 4, 3, 5, 8) + some(128, one, 8, 3, 5) + some(128, two, 8, 3)
        else:
            for rows in (64, 128):
                found += some(rows, one, 8, *((3, 4) if quick else (2, 3, 4, 5)))
                found += some(rows, one, 4, *((3,) if quick else (2, 3, 4, 6)))
    return found


def candidates(kind: str, bound: int, *, quick: bool) -> list[Tile]:
    """Tiles to try, the rule's not among them."""

    def some(rows: int, tokens: tuple[int, int], inputs: int, warps: int, *stages: int) -> list[Tile]:
        return [Tile(rows, tokens, inputs, count, warps) for count in stages]

    if bound <= 64:
        own = {48: [(32, 16), (64, 0)]}.get(bound, [(bound, 0)])
        found = []
        for tokens in own:
            found += some(128, tokens, 128, 4, 3, 4, 5) + some(64, tokens, 128, 4, 4, 6, 8)
            if not quick:
                found += some(128, tokens, 64, 4, 6, 8) + some(64, tokens, 256, 4, 3, 4)
                found += some(64, tokens, 128, 4, 5, 7, 10) if kind != "gate_up" else []
                found += some(128, tokens, 128, 8, 4) if bound > 32 else []
        return found
    if bound <= 256:
        own = {96: [(64, 32), (128, 0)], 128: [(128, 0), (64, 0)], 192: [(128, 64), (64, 32), (64, 0)]}
        found = []
        for tokens in own.get(bound, [(256, 0), (128, 128), (128, 0), (64, 0)]):
            # where a tile has an SM to itself, as much as fits is kept in flight
            found += some(128, tokens, 64, 8, 3, 4, 6) + some(64, tokens, 64, 4, 4, 6, 8)
            if not quick:
                found += some(64, tokens, 64, 8, 4, 6) + some(64, tokens, 128, 4, 3, 4)
                found += some(128, tokens, 64, 4, 4, 6) if sum(tokens) <= 128 else []
                found += some(128, tokens, 64, 8, 5) + some(128, tokens, 128, 8, 2, 3)
                # few programs that each read little twice: what comes out of L2 is the limit here
                found += some(256, tokens, 64, 8, 3, 4) + some(256, tokens, 64, 16, 3, 4)
        return found
    # (128, 128): as wide as (256, 0), with an epilogue that needs half the registers at a time
    found = some(128, (256, 0), 64, 8, 3, 4) + some(128, (128, 128), 64, 8, 3, 4)
    found += some(128, (128, 0), 64, 8, 4) + some(128, (128, 0), 64, 4, 3, 4)
    if not quick:
        found += some(256, (128, 0), 64, 8, 3, 4) + some(128, (128, 64), 64, 8, 4)
        found += some(64, (256, 0), 64, 8, 4) + some(64, (128, 128), 64, 4, 4)
    return found


def refinements(tile: Tile, bound: int) -> list[Tile]:
    """What a tile in use is compared with: the same loaded otherwise, and wide ones by boxes."""
    if bound <= 64:
        # what is waited for behind the loop is a good part of a short kernel
        found = [replace(tile, early=True)]
        if bound > 32:
            found += [replace(tile, boxes=True), replace(tile, early=True, boxes=True)]
        return found
    found = [replace(tile, boxes=True), replace(tile, early=True), replace(tile, early=True, boxes=True)]
    own = {96: [(64, 32)], 128: [(128, 0), (64, 0)], 192: [(128, 64), (64, 32)]}
    for tokens in own.get(bound, [(256, 0), (128, 128), (128, 0)]):
        wide = sum(tokens)
        for rows, warps in ((64, 4), (128, 4), (128, 8), (256, 8)):
            if 32 <= rows * wide // (32 * warps) <= 192:  # registers of a thread that hold products
                stages = (SHARED - 1024) // ((rows + wide) * 128)
                found += [
                    Tile(rows, tokens, 64, count, warps, tile.prefetch, boxes=True)
                    for count in (stages, stages - 1)
                    if 2 <= count <= 8
                ]
    return found
