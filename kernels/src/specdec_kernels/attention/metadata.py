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

    ``extra[t]`` names the scratch slots of the token's ancestors in a tree, from the root down, and its
    own, a parent's below its child's, one behind the other. Under a sliding window their positions
    follow from that: the last is the token's own, each other one lies a position before the next.

    ``tokens_per_row``, ``lengths`` and ``max_slots`` tell the host what it would have to ask the
    device for: how tokens lie beside each other, and how far they see. They change no result. With
    neither of the first two a kernel takes the tokens one by one.
    """

    rows: torch.Tensor  #: ``[T]`` int64, ascending
    positions: torch.Tensor  #: ``[T]`` int64, for sliding windows; ``base - 1`` and the tree levels below it
    write_slots: torch.Tensor  #: ``[T]`` int64, physical slots (block * block_size + offset)
    base: torch.Tensor  #: ``[T]`` int64
    block_table: torch.Tensor  #: ``[B, max_blocks]`` int64, padded with block 0, the null block
    block_size: int
    first: int = 0
    extra: torch.Tensor | None = None  #: ``[T, E]`` int64 logical slots, -1 where unused
    #: every row of the table has so many tokens: ``rows`` is ``arange(B)``, each repeated
    tokens_per_row: int | None = None
    lengths: tuple[int, ...] | None = None  #: tokens of each row of the table, zero where it has none
    #: no token sees a slot at or above it; None: what the table holds. Sizes grids and workspaces
    max_slots: int | None = None
    plans: dict[Any, Any] = dataclasses.field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Lay the indices out one behind the other: kernels read them by their addresses.

        Raises:
            ValueError: ``tokens_per_row`` or ``lengths`` do not give ``T`` tokens of ``B`` rows.
        """
        tokens, rows = self.rows.shape[0], self.block_table.shape[0]
        if self.tokens_per_row is not None and self.tokens_per_row * rows != tokens:
            raise ValueError(f"{rows} rows of {self.tokens_per_row} tokens are not {tokens} tokens")
        if self.lengths is not None and (len(self.lengths) != rows or sum(self.lengths) != tokens):
            raise ValueError(f"lengths {self.lengths} are not those of {tokens} tokens of {rows} rows")
        for name in ("rows", "positions", "write_slots", "base", "block_table"):
            setattr(self, name, getattr(self, name).contiguous())
        if self.extra is not None:
            self.extra = self.extra.contiguous()
