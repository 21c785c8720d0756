"""Where each query token reads and writes in a paged KV cache."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch


@dataclasses.dataclass(eq=False)
class AttentionMetadata:
    """``T`` query tokens of ``B`` rows over a paged cache of blocks of ``block_size`` slots.

    Token ``t`` of row ``rows[t]`` sees the logical slots ``first..base[t]-1`` and those listed in
    ``extra[t]``; logical slot ``j`` of a row lies in slot ``j % block_size`` of block
    ``block_table[row, j // block_size]``. Built once a step and shared by all layers; ``plans``
    caches what an implementation derives from it.

    Keys are written before they are read, so a token may see those of its own forward.

    ``extra[t]`` names the scratch slots of the token's ancestors in a tree and its own, a parent's
    below its child's. Under a sliding window their positions follow from that: the last is the
    token's own, each other one lies a position before the next.
    """

    rows: torch.Tensor  #: ``[T]`` int64, ascending
    positions: torch.Tensor  #: ``[T]`` int64, for sliding windows; ``base - 1`` and the tree levels below it
    write_slots: torch.Tensor  #: ``[T]`` int64, physical slots (block * block_size + offset)
    base: torch.Tensor  #: ``[T]`` int64
    block_table: torch.Tensor  #: ``[B, max_blocks]`` int64, padded with block 0, the null block
    block_size: int
    first: int = 0
    extra: torch.Tensor | None = None  #: ``[T, E]`` int64 logical slots, -1 where unused
    plans: dict[Any, Any] = dataclasses.field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Lay the indices out one behind the other: kernels read them by their addresses."""
        for name in ("rows", "positions", "write_slots", "base", "block_table"):
            setattr(self, name, getattr(self, name).contiguous())
        if self.extra is not None:
            self.extra = self.extra.contiguous()
