"""Documents put into rows of one length, so that a whole epoch's batches cost the host nothing more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import numpy as np
import torch

from .texts import Texts

#: Rows that are open while an epoch is packed.
_OPEN_ROWS = 64


@attrs.frozen
class Piece:
    """A stretch of a document, by the indices of its tokens among all."""

    document: int  #: where the document begins
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@attrs.frozen(kw_only=True, eq=False)
class PackedRows:
    """Rows of tokens on the device: of each place the token's index in the corpus, and its document."""

    index: torch.Tensor  #: ``[R, T]`` int64; 0 where there is none
    documents: torch.Tensor  #: ``[R, T]`` int64, counted within the row; -1: padding
    pieces: Sequence[Sequence[Piece]]  #: of each row, from its left end on

    def __len__(self) -> int:
        return len(self.index)


def within(lengths: np.ndarray) -> np.ndarray:
    """``0 .. n - 1`` for each ``n`` of ``lengths``, one behind the other; int64."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def pack(
    texts: Texts, chosen: np.ndarray, row_tokens: int, device: torch.device, *, rows_multiple: int = 1
) -> PackedRows:
    """Put documents into rows, in their order: each into the first of the open rows that has room.

    A document longer than a row is cut; the parts count as documents. Rows are filled up with empty ones to a
    multiple of ``rows_multiple``.
    """
    placed: list[list[Piece]] = []
    room: list[int] = []
    for piece in _pieces(texts, chosen, row_tokens):
        length = len(piece)
        for row in range(max(0, len(room) - _OPEN_ROWS), len(room)):
            if room[row] >= length:
                break
        else:
            placed.append([])
            room.append(row_tokens)
            row = len(room) - 1
        placed[row].append(piece)
        room[row] -= length
    placed += [[] for _ in range(-len(placed) % rows_multiple)]
    index = np.zeros((len(placed), row_tokens), np.int64)
    documents = np.full((len(placed), row_tokens), -1, np.int64)
    for row, pieces in enumerate(placed):
        at = 0
        for document, piece in enumerate(pieces):
            index[row, at : at + len(piece)] = np.arange(piece.start, piece.stop)
            documents[row, at : at + len(piece)] = document
            at += len(piece)
    return PackedRows(
        index=torch.from_numpy(index).to(device),
        documents=torch.from_numpy(documents).to(device),
        pieces=placed,
    )


def _pieces(texts: Texts, chosen: np.ndarray, longest: int) -> Iterator[Piece]:
    for document in chosen:
        start, stop = int(texts.starts[document]), int(texts.starts[document + 1])
        for begin in range(start, stop, longest):
            yield Piece(start, begin, min(begin + longest, stop))
