"""Token embedding."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..distributed import SOLO, Group, Share, rows_per_rank
from .linear import copy_checked


class GivenEmbeddings(NamedTuple):
    """Vectors that stand for some of a step's ``T`` tokens in place of the table's."""

    tokens: torch.Tensor  #: ``[P]`` int64, indices into T
    vectors: torch.Tensor  #: ``[P, H]``

    def put_into(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, H]``, embeddings of all tokens, with these put in."""
        return x.index_copy(0, self.tokens, self.vectors.to(x.dtype))


class VocabEmbedding(torch.nn.Module):
    """A table of ``V`` vectors, of which each rank holds some rows.

    Args:
        whole: every rank holds all rows: reading ``weight`` is embedding, as draft methods may want it.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: Group = SOLO,
        whole: bool = False,
    ) -> None:
        super().__init__()
        rows = rows_per_rank(vocab_size, group.size)
        self.whole = whole or group.size == 1
        self._group = group
        self._start = 0 if self.whole else group.rank * rows
        self._vocab_size = vocab_size
        # Padded, so that every rank's rows are as many.
        made = torch.zeros if vocab_size % rows else torch.empty
        rows *= group.size if self.whole else 1
        self.weight = torch.nn.Parameter(
            made(rows, hidden_size, dtype=dtype, device=device), requires_grad=False
        )

    @property
    def rows(self) -> torch.Tensor:
        """This rank's rows, ``[rows_per_rank, H]``: those of a tied output layer."""
        if not self.whole:
            return self.weight.data
        rows = len(self.weight) // self._group.size
        return self.weight.data[self._group.rank * rows :][:rows]

    def share(self, kind: str, part: str | None = None) -> Share | None:
        """What of a checkpoint's table ``[V, H]`` is held here; None: all of it."""
        if self._group.size == 1:
            return None
        start = min(self._start, self._vocab_size)
        return Share(0, start, min(len(self.weight), self._vocab_size - start), self._vocab_size)

    def shape(self, kind: str, part: str | None = None) -> tuple[int, ...]:
        """Of a checkpoint's table."""
        return self._vocab_size, self.weight.shape[1]

    def destination(self, kind: str, part: str | None = None) -> torch.Tensor:
        """Where that belongs."""
        share = self.share(kind)
        return self.weight.data if share is None else self.weight.data[: share.size]

    def load(self, kind: str, tensor: torch.Tensor, part: str | None = None) -> None:
        """Take a checkpoint's table ``[V, H]``; ValueError if its shape is another one."""
        copy_checked(self.destination(kind), tensor)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """``[T]`` int64 -> ``[T, H]``."""
        if self.whole:
            return F.embedding(ids, self.weight)
        own = ids - self._start
        held = (own >= 0) & (own < len(self.weight))
        x = F.embedding(torch.where(held, own, 0), self.weight)
        return self._group.all_reduce(x.masked_fill(~held[:, None], 0.0))
