"""Token embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .linear import copy_checked


class VocabEmbedding(torch.nn.Module):
    """A table of ``V`` vectors."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        table = torch.empty(vocab_size, hidden_size, dtype=dtype, device=device)
        self.weight = torch.nn.Parameter(table, requires_grad=False)

    def load(self, kind: str, tensor: torch.Tensor, part: str | None = None) -> None:
        """Take a checkpoint's table ``[V, H]``; ValueError if its shape is another one."""
        copy_checked(self.weight.data, tensor)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """``[T]`` int64 -> ``[T, H]``."""
        return F.embedding(ids, self.weight)
