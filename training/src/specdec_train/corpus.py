"""Texts and states on the device, and batches of them.

A whole epoch is packed at once, so that a step costs the host nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import numpy as np
import torch
from specdecode.models.weights import stored_in

from .recipe import Batch, Boundary
from .states import state_file
from .texts import Texts

#: Share of the device's free memory that states may fill; what does not fit stays in its files.
_RESIDENT = 0.6
#: Rows that are open while an epoch is packed.
_OPEN_ROWS = 64


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


@attrs.frozen(kw_only=True, eq=False)
class Corpus:
    """Everything that batches are made of."""

    texts: Texts
    ids: torch.Tensor  #: ``[N]`` int64, on the device
    answer: torch.Tensor  #: ``[N]`` bool, on the device
    positions: torch.Tensor  #: ``[N]`` int64, on the device
    states: Mapping[Boundary, States]
    device: torch.device

    @classmethod
    def load(
        cls, folder: Path, shards: Sequence[Texts], boundaries: Sequence[Boundary], device: torch.device
    ) -> Corpus:
        texts = Texts.joined(shards)
        files = {
            boundary: [state_file(folder, boundary, shard) for shard in range(len(shards))]
            for boundary in boundaries
        }
        size = sum(file.stat().st_size for group in files.values() for file in group)
        resident = device.type != "cuda" or size < _RESIDENT * torch.cuda.mem_get_info(device)[0]
        lengths = np.diff(texts.starts)
        positions = np.arange(len(texts.ids)) - np.repeat(texts.starts[:-1], lengths)
        return cls(
            texts=texts,
            ids=torch.from_numpy(texts.ids).to(device, torch.int64),
            answer=torch.from_numpy(texts.answer).to(device),
            positions=torch.from_numpy(positions).to(device),
            states={
                boundary: States(group, device, resident=resident and device.type == "cuda")
                for boundary, group in files.items()
            },
            device=device,
        )

    def batch(self, rows: PackedRows, part: slice) -> Batch:
        """Rows ``part``, gathered."""
        index, documents = rows.index[part], rows.documents[part]
        there = documents >= 0
        return Batch(
            ids=self.ids[index] * there,
            answer=self.answer[index] & there,
            documents=documents,
            positions=self.positions[index] * there,
            features={boundary: states[index] for boundary, states in self.states.items()},
        )


@attrs.frozen(kw_only=True, eq=False)
class PackedRows:
    """Rows of tokens on the device: of each place the token's index in the corpus, and its document."""

    index: torch.Tensor  #: ``[R, T]`` int64; 0 where there is none
    documents: torch.Tensor  #: ``[R, T]`` int64, counted within the row; -1: padding

    def __len__(self) -> int:
        return len(self.index)


def pack(
    texts: Texts, chosen: np.ndarray, row_tokens: int, device: torch.device, *, rows_multiple: int = 1
) -> PackedRows:
    """Put documents into rows, in their order: each into the first of the open rows that has room.

    A document longer than a row is cut; the parts count as documents. Rows are filled up with empty ones to a
    multiple of ``rows_multiple``.
    """
    placed: list[list[tuple[int, int]]] = []
    room: list[int] = []
    first_open = 0
    for start, stop in _pieces(texts, chosen, row_tokens):
        length = stop - start
        for row in range(max(first_open, len(room) - _OPEN_ROWS), len(room)):
            if room[row] >= length:
                break
        else:
            placed.append([])
            room.append(row_tokens)
            row = len(room) - 1
        placed[row].append((start, stop))
        room[row] -= length
    count = -(-len(placed) // rows_multiple) * rows_multiple
    index = np.zeros((count, row_tokens), np.int64)
    documents = np.full((count, row_tokens), -1, np.int64)
    for row, pieces in enumerate(placed):
        at = 0
        for document, (start, stop) in enumerate(pieces):
            index[row, at : at + stop - start] = np.arange(start, stop)
            documents[row, at : at + stop - start] = document
            at += stop - start
    return PackedRows(
        index=torch.from_numpy(index).to(device), documents=torch.from_numpy(documents).to(device)
    )


def _pieces(texts: Texts, chosen: np.ndarray, longest: int) -> Iterator[tuple[int, int]]:
    for document in chosen:
        start, stop = int(texts.starts[document]), int(texts.starts[document + 1])
        for begin in range(start, stop, longest):
            yield begin, min(begin + longest, stop)


class Batches:
    """The batch of every step: epochs in orders that follow from the seed and their number alone."""

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
