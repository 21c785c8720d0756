"""The target's states computed with each batch: nothing is stored, and no pass goes before training.

A batch costs a forward of the target more, once: on a GPU whose memory holds the states of all texts they
stay there, and later epochs read them. Stored states (:mod:`specdec_train.states`) wait for a pass over all
texts and their way to the disk and back: they pay where several runs share them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import torch
from specdec_kernels.attention import AttentionMetadata
from specdecode.models import Decoder
from specdecode.runner.seats import send

from .packing import PackedRows, Piece, within
from .recipe import Boundary
from .states import fit

#: Slots of a KV block.
_BLOCK = 16


class FreshStates:
    """Runs ``model`` over the documents of packed rows.

    Of a document that was cut, what stands in front of a piece is computed as well: its states are those of
    the whole text.
    """

    def __init__(
        self,
        model: Decoder,
        boundaries: Sequence[Boundary],
        ids: torch.Tensor,
        *,
        keep: bool | None = None,
    ) -> None:
        """
        Args:
            ids: ``[N]`` int64, of all texts, on the model's device.
            keep: whether what was computed stays in the device's memory; None: if there is room.
        """
        self._model, self._boundaries, self._ids = model, tuple(boundaries), ids
        shape = (len(ids), model.config.hidden_size)
        if keep is None:
            size = len(self._boundaries) * shape[0] * shape[1] * model.dtype.itemsize
            keep = fit(size, self._device)
        self._kept: dict[Boundary, torch.Tensor] = {}
        if keep:
            self._kept = {b: torch.zeros(shape, dtype=model.dtype, device=ids.device) for b in boundaries}
        self._computed = np.zeros(len(ids), bool)
        # One layer's memory serves all: each writes every slot before it reads any.
        self._cache: tuple[torch.Tensor, torch.Tensor] | None = None

    @torch.no_grad()
    def features(self, rows: PackedRows, part: slice) -> Mapping[Boundary, torch.Tensor]:
        """``[B, T, H]`` at each boundary; zeros where a row is filled up."""
        chosen = rows.pieces[part]
        index = rows.index[part]
        if self._kept and all(self._computed[p.start : p.stop].all() for row in chosen for p in row):
            there = (rows.documents[part] >= 0)[..., None]
            return {boundary: states[index] * there for boundary, states in self._kept.items()}
        return self._compute(chosen, index.shape)

    def _compute(
        self, chosen: Sequence[Sequence[Piece]], shape: torch.Size
    ) -> Mapping[Boundary, torch.Tensor]:
        plan = _Plan.of(chosen, shape[1])
        taps = tuple(boundary for boundary in self._boundaries if isinstance(boundary, int))
        width = self._model.config.hidden_size
        found = {
            boundary: torch.zeros(shape[0] * shape[1], width, dtype=self._model.dtype, device=self._device)
            for boundary in self._boundaries
        }
        if len(plan.tokens):
            tokens, positions, slots, owners, source, place = self._on_device(plan)
            meta = AttentionMetadata(
                rows=owners,
                positions=positions,
                write_slots=slots,
                base=positions + 1,
                block_table=send(plan.table, self._device),
                block_size=_BLOCK,
                lengths=plan.lengths,
                max_slots=plan.table.shape[1] * _BLOCK,
            )
            caches = [self._memory(plan.blocks)] * self._model.config.num_layers
            with torch.autocast(self._device.type, enabled=False):
                hidden, tapped = self._model(self._ids[tokens], positions, meta, caches, taps)
            made: dict[Boundary, torch.Tensor] = {"final": hidden}
            made.update(zip(taps, tapped, strict=True))
            wanted = {boundary: made[boundary][source] for boundary in found}
            for boundary, states in found.items():
                states[place] = wanted[boundary]
            if self._kept:
                self._remember(chosen, tokens[source], wanted)
        return {boundary: states.view(*shape, width) for boundary, states in found.items()}

    @property
    def _device(self) -> torch.device:
        return self._model.device

    def _remember(
        self,
        pieces: Sequence[Sequence[Piece]],
        tokens: torch.Tensor,
        made: Mapping[Boundary, torch.Tensor],
    ) -> None:
        for boundary, states in self._kept.items():
            states[tokens] = made[boundary]
        for piece in (piece for row in pieces for piece in row):
            self._computed[piece.start : piece.stop] = True

    def _on_device(self, plan: _Plan) -> Sequence[torch.Tensor]:
        """All indices in one copy."""
        parts = (plan.tokens, plan.positions, plan.slots, plan.owners, plan.source, plan.place)
        return send(np.concatenate(parts), self._device).split([len(p) for p in parts])

    def _memory(self, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._cache is None or len(self._cache[0]) < blocks:
            model, config = self._model, self._model.config
            shapes = [(blocks, _BLOCK, model.kv_heads, dim) for dim in (config.head_dim, config.value_dim)]
            keys, values = (torch.zeros(shape, dtype=model.dtype, device=model.device) for shape in shapes)
            self._cache = keys, values
        return self._cache


@attrs.frozen(kw_only=True, eq=False)
class _Plan:
    """Where the tokens of one batch's documents go in, and where their states come out; int64 on the host."""

    tokens: np.ndarray  #: ``[F]`` of the texts, a document behind the other
    positions: np.ndarray  #: ``[F]``
    slots: np.ndarray  #: ``[F]`` physical, in blocks of each document's own
    owners: np.ndarray  #: ``[F]`` the document of each
    source: np.ndarray  #: ``[S]`` which of ``F`` are wanted
    place: np.ndarray  #: ``[S]`` and where in the rows, flattened
    table: np.ndarray  #: ``[D, most blocks]``
    lengths: tuple[int, ...]  #: of each document, as far as it is computed
    blocks: int

    @classmethod
    def of(cls, rows: Sequence[Sequence[Piece]], row_tokens: int) -> _Plan:
        pieces = [piece for row in rows for piece in row]
        lengths = np.array([piece.stop - piece.document for piece in pieces], np.int64)
        wanted = np.array([len(piece) for piece in pieces], np.int64)
        filled = np.array([sum(map(len, row)) for row in rows], np.int64)  # from each row's left end on
        blocks = -(-lengths // _BLOCK)
        first_blocks = np.cumsum(blocks) - blocks
        owners, positions = np.repeat(np.arange(len(pieces)), lengths), within(lengths)
        begins = np.array([piece.document for piece in pieces], np.int64)
        starts = np.array([piece.start for piece in pieces], np.int64)
        columns = np.arange(blocks.max(initial=1))
        return cls(
            tokens=begins[owners] + positions,
            positions=positions,
            slots=first_blocks[owners] * _BLOCK + positions,
            owners=owners,
            source=np.repeat(np.cumsum(lengths) - lengths + starts - begins, wanted) + within(wanted),
            place=np.repeat(np.arange(len(rows)) * row_tokens, filled) + within(filled),
            table=np.where(columns < blocks[:, None], first_blocks[:, None] + columns, 0),
            lengths=tuple(lengths.tolist()),
            blocks=int(blocks.sum()),
        )
