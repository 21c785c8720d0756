"""Kernels that sum over ranks through each other's memory, played: what they read is of their own sum."""

from __future__ import annotations

import random

import pytest

#: Words of a rank's half; a sum uses the first ones.
WORDS = 6
SUMS = 30


class Rank:
    """Sums in turn, of some programs each that run as they like; one begins when the one before has ended."""

    def __init__(self, rank, memory, sizes):
        self.rank, self.memory, self.sizes = rank, memory, sizes
        self.number, self.programs = -1, []
        self.next_sum()

    def next_sum(self):
        self.number += 1
        if self.number < len(self.sizes):
            words = list(range(self.sizes[self.number]))
            cut = self.number % 3 + 1  # words of a program: sums are cut in other ways
            self.programs = [self.program(words[at : at + cut]) for at in range(0, len(words), cut)]

    @property
    def ended(self):
        return self.number == len(self.sizes)

    def program(self, words):
        """As ``specdec_kernels.ranks.gpu`` has it: sends all its words, then waits for those of each rank."""
        number, half = self.number, self.number % 2
        for other in self.memory:
            for word in words:
                other[half][self.rank][word] = (number + 1, (self.rank, number, word))
                yield
        for rank in range(len(self.memory)):
            for word in words:
                while self.memory[self.rank][half][rank][word][0] != number + 1:
                    yield
                assert self.memory[self.rank][half][rank][word][1] == (rank, number, word)
                yield

    def step(self, rng):
        """One program goes on by one access; whether any is left."""
        program = rng.choice(self.programs)
        if next(program, "done") == "done":
            self.programs.remove(program)
            if not self.programs:
                self.next_sum()


def play(rng, memory, most=None):
    """Until all sums have ended, or ``most`` steps were taken; whether all have."""
    sizes = [rng.randint(1, WORDS) for _ in range(SUMS)]
    playing = [Rank(rank, memory, sizes) for rank in range(len(memory))]
    steps = 0
    while running := [rank for rank in playing if not rank.ended]:
        if most is not None and steps > most:
            return False
        # One may be much faster than the others, for a while.
        favourite = rng.choice(running)
        for _ in range(rng.randint(1, 60)):
            chosen = favourite if rng.random() < 0.9 else rng.choice(running)
            steps += 1
            if not chosen.ended:
                chosen.step(rng)
    return True


def empty_halves(ranks, halves):
    """``[rank, half, rank that writes there, word]``: a number, and what it came with."""
    return [[[[(0, None)] * WORDS for _ in range(ranks)] for _ in range(halves)] for _ in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_sum_reads_its_own_words(ranks):
    assert all(play(random.Random(seed), empty_halves(ranks, 2)) for seed in range(40))


def test_with_one_half_a_fast_rank_overwrites_what_is_not_read():
    """That the play finds what the two halves are for: a word that was overwritten is waited for in vain."""
    memories = ([[half, half] for (half,) in empty_halves(2, 1)] for _ in range(40))
    assert not all(play(random.Random(seed), memory, most=100_000) for seed, memory in enumerate(memories))
