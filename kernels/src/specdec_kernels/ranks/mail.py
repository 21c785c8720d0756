"""The memory that sums over ranks go through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

#: In :attr:`Mail.state`: sums so far, programs of the one under way that are done, whether to wait for
#: nobody, this rank, and from here on the address of each rank's words.
NUMBER, DONE, STOP, RANK, BOXES = range(5)


@dataclass(frozen=True, eq=False)
class Mail:
    """A rank's end of it.

    All ranks make the same sums in the same order, each on one stream, by as many programs. Two sums that
    follow each other use different halves of the memory: a rank that writes for the next but one has had the
    next one's words of all others, who by then had read this one's.

    Attributes:
        state: ``[4 + ranks]`` int64; see :data:`NUMBER`.
        ranks: at least 2.
        words: ``W``, of one sum at most. A rank's memory is ``[2, ranks, W]`` int64, zero at first: halves in
            turn, then the rank that writes there.
    """

    state: torch.Tensor
    ranks: int
    words: int

    @staticmethod
    def of(addresses: Sequence[int], rank: int, words: int, device: torch.device) -> Mail:
        """Before the first sum.

        Args:
            addresses: of each rank's memory, as this rank reaches it.
        """
        state = torch.tensor([0, 0, 0, rank, *addresses], dtype=torch.int64, device=device)
        return Mail(state, len(addresses), words)

    @property
    def stop(self) -> torch.Tensor:
        """``[1]`` int64 of the state: once it is not 0, sums wait for nobody, and are worth nothing."""
        return self.state[STOP : STOP + 1]

    @staticmethod
    def shape(ranks: int, words: int) -> tuple[int, int, int]:
        """Of a rank's memory."""
        return 2, ranks, words

    def takes(self, tokens: int, width: int, dtype: torch.dtype) -> bool:
        """Whether a sum of ``[tokens, width]`` fits; by its shape alone, so that all ranks find the same."""
        return 0 < words_of_sum(tokens, width, dtype) <= self.words


def words_of_sum(tokens: int, width: int, dtype: torch.dtype) -> int:
    """Words that a rank sends each other: two bfloat16 share one, of two tokens that follow each other."""
    return (-(-tokens // 2) if dtype is torch.bfloat16 else tokens) * width


def sum_over_ranks(x: torch.Tensor, mail: Mail) -> torch.Tensor:
    """The sum of all ranks' ``x``, of its shape and dtype: in float32, in their order, rounded once.

    Args:
        x: ``[..., H]`` on a GPU, contiguous, in float32, bfloat16 or float16; :meth:`Mail.takes` it as
            ``[numel / H, H]``.
    """
    from . import gpu  # needs Triton

    return gpu.sum_over_ranks(x, mail)
