"""Texts on the device, the target's states of them, and batches of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import attrs
import numpy as np
import torch
from specdecode.models.weights import stored_in

from .packing import PackedRows, pack, within
from .recipe import Batch, Boundary
from .states import fit, state_file
from .texts import Texts


class States:
    """The states at one boundary, of all tokens, by index; in the device's memory, or mapped from files."""

    def __init__(self, files: Sequence[Path], device: torch.device, *, resident: bool) -> None:
        mapped = [_mapped(file) for file in files]
        self._device = device
        self._starts = np.cumsum([0, *(len(part) for part in mapped)])
        self._mapped = [] if resident else mapped
        self._whole: torch.Tensor | None = None
        if resident:
            first = mapped[0]
            self._whole = torch.empty((self._starts[-1], first.shape[1]), dtype=first.dtype, device=device)
            for part, start in zip(mapped, self._starts, strict=False):
                self._whole[start : start + len(part)] = part.to(device)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: torch.Tensor) -> torch.Tensor:
        """``index`` int64 of any shape, on the device -> ``[..., H]`` there."""
        if self._whole is not None:
            return self._whole[index]
        flat = index.flatten().cpu()
        shard = torch.from_numpy(np.searchsorted(self._starts, flat.numpy(), side="right") - 1)
        found = torch.empty((len(flat), self._mapped[0].shape[1]), dtype=self._mapped[0].dtype)
        for number in shard.unique().tolist():
            of = (shard == number).nonzero()[:, 0]
            found[of] = self._mapped[number][flat[of] - int(self._starts[number])]
        return found.to(self._device).view(*index.shape, -1)


def _mapped(file: Path) -> torch.Tensor:
    """The one tensor of a safetensors file, which stays on the disk until it is read."""
    (tensor,) = stored_in(file)
    return tensor.map()


class StateSource(Protocol):
    """Where the target's states of a batch come from."""

    def features(self, rows: PackedRows, part: slice) -> Mapping[Boundary, torch.Tensor]:
        """Of rows ``part``, ``[B, T, H]`` at each boundary, on the device."""


class StoredStates:
    """States that were written once (:func:`~specdec_train.states.make_states`)."""

    def __init__(
        self, folder: Path, shards: int, boundaries: Sequence[Boundary], device: torch.device
    ) -> None:
        files = {
            boundary: [state_file(folder, boundary, shard) for shard in range(shards)]
            for boundary in boundaries
        }
        size = sum(file.stat().st_size for group in files.values() for file in group)
        resident = fit(size, device)  # what does not fit stays in its files
        self._at = {boundary: States(group, device, resident=resident) for boundary, group in files.items()}

    def features(self, rows: PackedRows, part: slice) -> Mapping[Boundary, torch.Tensor]:
        index = rows.index[part]
        return {boundary: states[index] for boundary, states in self._at.items()}


@attrs.frozen(kw_only=True, eq=False)
class Corpus:
    """Everything that batches are made of."""

    texts: Texts
    ids: torch.Tensor  #: ``[N]`` int64, on the device
    answer: torch.Tensor  #: ``[N]`` bool, on the device
    positions: torch.Tensor  #: ``[N]`` int64, on the device
    states: StateSource

    @classmethod
    def of(cls, texts: Texts, states: Callable[[torch.Tensor], StateSource], device: torch.device) -> Corpus:
        """``states`` is given the texts' ids ``[N]`` on the device."""
        ids = torch.from_numpy(texts.ids).to(device, torch.int64)
        return cls(
            texts=texts,
            ids=ids,
            answer=torch.from_numpy(texts.answer).to(device),
            positions=torch.from_numpy(within(np.diff(texts.starts))).to(device),
            states=states(ids),
        )

    @property
    def device(self) -> torch.device:
        return self.ids.device

    def batch(self, rows: PackedRows, part: slice) -> Batch:
        """Rows ``part``, gathered."""
        index, documents = rows.index[part], rows.documents[part]
        there = documents >= 0
        return Batch(
            ids=self.ids[index] * there,
            answer=self.answer[index] & there,
            documents=documents,
            positions=self.positions[index] * there,
            features=self.states.features(rows, part),
        )


class Batches:
    """The batch of every step: epochs in orders that follow from the seed and their number alone.

    A whole epoch is packed at once, so that a step costs the host nothing.
    """

    def __init__(self, corpus: Corpus, *, row_tokens: int, batch_rows: int, seed: int) -> None:
        self._corpus, self._row_tokens, self._batch_rows, self._seed = corpus, row_tokens, batch_rows, seed
        self._trained = np.flatnonzero(~corpus.texts.held_out)
        self._epochs: list[tuple[int, int]] = []  # number, first step
        self._rows: PackedRows | None = None
        self._epoch, self._first, self._steps = -1, 0, 0

    def batch(self, step: int) -> Batch:
        """Steps must not go back."""
        while step >= self._first + self._steps:
            self._next_epoch()
        assert self._rows is not None
        start = (step - self._first) * self._batch_rows
        return self._corpus.batch(self._rows, slice(start, start + self._batch_rows))

    def _next_epoch(self) -> None:
        self._first += self._steps
        self._epoch += 1
        order = np.random.default_rng((self._seed, self._epoch)).permutation(self._trained)
        self._rows = pack(
            self._corpus.texts,
            order,
            self._row_tokens,
            self._corpus.device,
            rows_multiple=self._batch_rows,
        )
        self._steps = len(self._rows) // self._batch_rows
