"""Token embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .linear import Layout, copy_checked


class VocabEmbedding(torch.nn.Module):
    """A table of ``V`` vectors.

    Args:
        layout: ``ROWS``, or that of the output layer which is tied to it, so that both read one
            table in the layout in which the product with it is fastest.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        layout: Layout = Layout.ROWS,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.layout = layout
        shape = (vocab_size, hidden_size) if layout is Layout.ROWS else (hidden_size, vocab_size)
        self.weight = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

    def load(self, kind: str, tensor: torch.Tensor, part: str | None = None) -> None:
        """Take a checkpoint's table ``[V, H]``; ValueError if its shape is another one."""
        copy_checked(self.weight.data if self.layout is Layout.ROWS else self.weight.data.t(), tensor)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """``[T]`` int64 -> ``[T, H]``."""
        if self.layout is Layout.ROWS:
            return F.embedding(ids, self.weight)
        return self.weight.index_select(1, ids).t().contiguous()
