"""Flags by which kernels that sum over ranks wait for each other, called off; the kernels are played."""

from __future__ import annotations

import random

import pytest
from specdecode.distributed.peers import calls

BLOCKS = 3
#: Sums that may be on their way, and turns of calling off that each may take.
SUMS, TURNS = 20, 6


class Block:
    """Blocks of kernels in turn: for each rank a thread sets a flag there and waits for one here."""

    def __init__(self, pads, rank, block):
        self.pads, self.rank, self.block, self.ranks = pads, rank, block, len(pads)
        self.sums = 0
        self._begin()

    def _begin(self):
        self.waiting = {(other, "set") for other in range(self.ranks)}

    def step(self, other):
        """One look of a thread at its flag."""
        if (other, "set") in self.waiting:
            pad, at, old = self.pads[other], self.block * self.ranks + self.rank, 0
            following = {(other, "heard")}
        elif (other, "heard") in self.waiting:
            pad, at, old = self.pads[self.rank], self.block * self.ranks + other, 1
            following = set()
        else:
            return
        if pad[at] == old:
            pad[at] = 1 - old
            self.waiting = {wait for wait in self.waiting if wait[0] != other} | following
            if not self.waiting:
                self.sums += 1
                self._begin()


def turns_until_done(rank, ranks, seed):
    """Every other rank is dead; flags stand as they happened to."""
    rng = random.Random(seed)
    pads = [[rng.randint(0, 1) for _ in range(BLOCKS * ranks)] for _ in range(ranks)]
    blocks = [Block(pads, rank, block) for block in range(BLOCKS)]
    pattern = calls(rank, ranks, BLOCKS * ranks)
    turn = 0
    while min(block.sums for block in blocks) < SUMS:
        if turn > SUMS * TURNS:
            return None
        writes = [(other, at) for other in range(ranks) for at in range(BLOCKS * ranks)]
        rng.shuffle(writes)
        for other, at in writes:
            for _ in range(rng.randint(0, 3)):  # kernels look whenever they like
                rng.choice(blocks).step(rng.randrange(ranks))
            pads[other][at] = int(pattern[turn % len(pattern)][other][at])
        for _ in range(rng.randint(0, 60)):
            rng.choice(blocks).step(rng.randrange(ranks))
        turn += 1
    return turn


@pytest.mark.parametrize("ranks", [2, 4])
def test_no_kernel_waits_for_a_rank_that_is_gone(ranks):
    for seed in range(60):
        assert turns_until_done(seed % ranks, ranks, seed) is not None, seed


def test_kernels_of_all_ranks_go_on_while_nobody_calls():
    """As they are played here, kernels do not wait for each other in a circle."""
    pads = [[0] * (BLOCKS * 2) for _ in range(2)]
    rng = random.Random(0)
    blocks = [Block(pads, rank, block) for rank in range(2) for block in range(BLOCKS)]
    for _ in range(20_000):
        rng.choice(blocks).step(rng.randrange(2))
    assert min(block.sums for block in blocks) >= SUMS
