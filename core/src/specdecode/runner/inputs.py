"""Stages a step's inputs: flat token arrays and where each token reads and writes."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import torch
from specdec_kernels.attention import AttentionMetadata

from ..engine.plan import RowPlan, StepPlan
from ..kv.pool import NULL_BLOCK


class SlotMap:
    """Block tables of a step's rows, side by side: logical slots to physical ones.

    It reaches as far as drafting may look in any row: the tokens there are, those this step may add, and
    the scratch slots. Slots beyond a row's blocks are the null block's: a drafter that works on all rows
    alike gets there in rows that have no scratch slots.
    """

    def __init__(
        self, rows: Sequence[RowPlan], block_size: int, device: torch.device, scratch: int = 0
    ) -> None:
        self.block_size = block_size
        reach = max((len(row.request.token_ids) + len(row.drafts) for row in rows), default=0) + 1 + scratch
        tables = [row.request.table.blocks for row in rows]
        columns = max([-(-reach // block_size), *map(len, tables)]) + 1
        self.host = np.full((len(tables), columns), NULL_BLOCK, np.int64)
        for row, blocks in enumerate(tables):
            self.host[row, : len(blocks)] = blocks
        self.device = torch.from_numpy(self.host).to(device, non_blocking=True)

    def select(self, rows: Sequence[int]) -> SlotMap:
        """The map of some rows, in ascending order."""
        if len(rows) == len(self.host):
            return self
        chosen = SlotMap.__new__(SlotMap)
        chosen.block_size = self.block_size
        chosen.host = self.host[np.asarray(rows, np.int64)]
        chosen.device = torch.from_numpy(chosen.host).to(self.device.device, non_blocking=True)
        return chosen

    def physical(self, rows: torch.Tensor, slots: torch.Tensor, floors: torch.Tensor) -> torch.Tensor:
        """``[T]`` write slots; below a row's floor, and beyond its blocks, the null block's."""
        block = (slots // self.block_size).clamp_(max=self.host.shape[1] - 1)
        blocks = torch.where(slots < floors[rows], NULL_BLOCK, self.device[rows, block])
        return blocks * self.block_size + slots % self.block_size


@attrs.frozen(eq=False)
class TargetBatch:
    """Device inputs of one target forward over ``T`` tokens of ``B`` rows."""

    ids: torch.Tensor  #: ``[T]`` int64
    positions: torch.Tensor  #: ``[T]`` int64
    meta: AttentionMetadata
    slots: SlotMap
    offsets: list[int]  #: index into T of each row's first token
    logit_tokens: torch.Tensor  #: ``[R]`` int64, index into T of the tokens whose logits are wanted
    logit_offsets: list[int]  #: index into R of each row's first; -1 if it draws nothing
    adapters: torch.Tensor | None = None  #: ``[T]`` int64, the slot of its adapter, or -1; None: all -1


def stage(
    plan: StepPlan,
    block_size: int,
    device: torch.device,
    scratch: int = 0,
    max_slots: int | None = None,
) -> TargetBatch:
    """Lay the rows of ``plan`` out one after the other.

    Args:
        scratch: slots behind the tokens of any row that drafting may look at.
        max_slots: no row ever has a slot at or above it.
    """
    rows = plan.rows
    lengths = [row.num_tokens for row in rows]
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    ids = np.empty(offsets[-1], np.int64)
    positions = np.empty_like(ids)
    slots = np.empty_like(ids)
    base = np.empty_like(ids)
    depth = max((max(row.drafts.depths(), default=0) for row in rows if not _is_chain(row)), default=0)
    extra = np.full((len(ids), depth), -1, np.int64) if depth else None

    logit_tokens: list[int] = []
    logit_offsets: list[int] = []
    for row, first in zip(rows, offsets, strict=False):
        end = first + row.new
        ids[first:end] = row.request.token_ids[row.start : row.start + row.new]
        positions[first:end] = np.arange(row.start, row.start + row.new)
        if row.drafts:
            _stage_drafts(row, slice(end, first + row.num_tokens), ids, positions, slots, base, extra)
        slots[first:end] = positions[first:end]
        base[first:end] = positions[first:end] + 1
        logit_offsets.append(len(logit_tokens) if row.samples else -1)
        if row.samples:
            logit_tokens.extend(range(end - 1, first + row.num_tokens))

    slot_map = SlotMap(rows, block_size, device, scratch)
    row_of = torch.from_numpy(np.repeat(np.arange(len(rows)), lengths)).to(device)
    floors = torch.tensor([row.request.target_floor for row in rows], device=device)

    def on_device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    meta = AttentionMetadata(
        rows=row_of,
        positions=on_device(positions),
        write_slots=slot_map.physical(row_of, on_device(slots), floors),
        base=on_device(base),
        block_table=slot_map.device,
        block_size=block_size,
        extra=None if extra is None else on_device(extra),
        lengths=tuple(lengths),
        max_slots=max_slots,
    )
    return TargetBatch(
        ids=on_device(ids),
        positions=meta.positions,
        meta=meta,
        slots=slot_map,
        offsets=offsets[:-1].tolist(),
        logit_tokens=torch.tensor(logit_tokens, dtype=torch.int64, device=device),
        logit_offsets=logit_offsets,
        adapters=_adapters(rows, lengths, device),
    )


def _adapters(rows: Sequence[RowPlan], lengths: Sequence[int], device: torch.device) -> torch.Tensor | None:
    if all(row.request.adapter is None for row in rows):
        return None
    slots = np.array([row.request.adapter_slot for row in rows], np.int64)
    return torch.from_numpy(np.repeat(slots, lengths)).to(device, non_blocking=True)


def _is_chain(row: RowPlan) -> bool:
    return all(parent == node - 1 for node, parent in enumerate(row.drafts.parents))


def _stage_drafts(
    row: RowPlan,
    where: slice,
    ids: np.ndarray,
    positions: np.ndarray,
    slots: np.ndarray,
    base: np.ndarray,
    extra: np.ndarray | None,
) -> None:
    """Node ``i`` sits in scratch slot ``committed_len + i`` at position ``committed_len - 1 + depth``.

    In a chain the two are equal, so a plain causal bound serves; a node of a tree sees the
    committed tokens, its ancestors and itself.
    """
    committed = len(row.request.token_ids)
    ids[where] = row.drafts.ids
    slots[where] = committed + np.arange(len(row.drafts))
    positions[where] = committed - 1 + np.asarray(row.drafts.depths())
    if _is_chain(row):
        base[where] = positions[where] + 1
        return
    assert extra is not None
    base[where] = committed
    for token, path in zip(range(where.start, where.stop), row.drafts.paths(), strict=True):
        extra[token, : len(path)] = [committed + node for node in path]
