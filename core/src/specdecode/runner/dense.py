"""One row computed densely: a whole sequence in one forward, without pages, batch or prefix cache.

Nothing that paging, batching, chunking, prefix hits or preemption could get wrong is in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from specdec_kernels.attention import AttentionMetadata

from ..contract import FINAL, Tap
from ..layers import GivenEmbeddings
from ..models import Decoder, TransformersDecoder
from .adapting import adapted


class DenseRow:
    """KV layers of one row in one block: logical slot ``j`` is slot ``j``."""

    def __init__(
        self,
        shapes: Sequence[tuple[int, int, int]],
        slots: int,
        like: Decoder | TransformersDecoder,
    ) -> None:
        """``shapes``: heads, k_dim and v_dim of each layer."""

        def zeros(heads: int, dim: int) -> torch.Tensor:
            return torch.zeros(1, slots, heads, dim, dtype=like.dtype, device=like.device)

        self.caches = [(zeros(heads, k_dim), zeros(heads, v_dim)) for heads, k_dim, v_dim in shapes]
        self._table = torch.zeros(1, 1, dtype=torch.int64, device=like.device)
        self._slots = slots

    def clear(self) -> None:
        """Forget all entries."""
        for cache in self.caches:
            for tensor in cache:
                tensor.zero_()

    def metadata(
        self, slots: torch.Tensor, base: torch.Tensor, extra: torch.Tensor | None = None, first: int = 0
    ) -> AttentionMetadata:
        """For tokens that write ``slots`` and see ``first..base-1`` and ``extra`` (``[T]``, ``[T, E]``)."""
        return AttentionMetadata(
            rows=torch.zeros_like(slots),
            positions=slots,
            write_slots=slots,
            base=base,
            block_table=self._table,
            block_size=self._slots,
            first=first,
            extra=extra,
        )


@torch.inference_mode()
def dense_forward(
    model: Decoder | TransformersDecoder,
    ids: Sequence[int],
    taps: Sequence[Tap] = (),
    *,
    adapter: int = -1,
    given: GivenEmbeddings | None = None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The whole sequence in one forward: ``[T, H]`` after the final norm, and ``[T, H]`` for each tap.

    Args:
        adapter: the slot of the sequence's; -1: it has none.
        given: embeddings of tokens that stand for parts of images.
    """
    config = model.config
    # One layer's memory serves all: each writes every slot before it reads any.
    row = DenseRow([(model.kv_heads, config.head_dim, config.value_dim)], len(ids), model)
    caches = row.caches * config.num_layers
    positions = torch.arange(len(ids), device=model.device)
    boundaries = tuple(tap.boundary for tap in taps if isinstance(tap.boundary, int))
    tokens = torch.tensor(ids, dtype=torch.int64, device=model.device)
    more = {} if given is None else {"given": given}
    meta = row.metadata(positions, positions + 1)
    with adapted(model, torch.full_like(tokens, adapter) if adapter >= 0 else None):
        hidden, tapped = model(tokens, positions, meta, caches, boundaries, **more)
    found = dict(zip(boundaries, tapped, strict=True))
    return hidden, tuple(hidden if tap == FINAL else found[tap.boundary] for tap in taps)  # type: ignore[index]
