"""Weights from files into the tensors of a model: one at a time on a CPU, by several threads to a GPU."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias

import attrs
import torch

from specdecode.contract import ConfigError

from .weights import StoredTensor, open_weights

logger = logging.getLogger(__name__)

#: A stored tensor and where it goes: contiguous and of its shape; the dtype may differ.
Copy: TypeAlias = tuple[StoredTensor, torch.Tensor]

#: Threads that read for a GPU: one reads from the page cache at a few GB/s, the bus takes some 50.
_THREADS = 8
#: What a thread reads at a time, into one of its two buffers of pinned memory.
_PIECE_BYTES = 16 << 20
#: Less than this shows no progress bar unless it takes long.
_SHOWN_BYTES = 1 << 30
_SHOWN_SECONDS = 2.0


@attrs.frozen(eq=False)
class Turn:
    """Tensors that are read together, and something is made of before others are."""

    stored: Sequence[StoredTensor]
    #: where they go, as of :data:`Copy`, all on one device: asked when it is their turn
    destinations: Callable[[], Sequence[torch.Tensor]]
    done: Callable[[], None] = lambda: None

    @property
    def num_bytes(self) -> int:
        return sum(stored.num_bytes for stored in self.stored)


def read_weights(copies: Sequence[Copy]) -> None:
    """Fill the destinations, which are all on one device.

    Raises:
        ConfigError: a file cannot be read.
    """
    read_in_turns([Turn([stored for stored, _ in copies], lambda: [where for _, where in copies])])


def read_in_turns(turns: Sequence[Turn]) -> None:
    """Fill the destinations of each turn, one turn after the other.

    To a GPU the bytes go through a few pinned buffers and never lie on the host as a whole.

    Raises:
        ConfigError: a file cannot be read.
    """
    total = sum(turn.num_bytes for turn in turns)
    if not total:
        return
    started = time.perf_counter()
    with _progress(total) as advance:
        for turn in turns:
            copies = list(zip(turn.stored, turn.destinations(), strict=True))
            if copies and (device := copies[0][1].device).type == "cuda":
                torch.cuda.synchronize(device)  # what made them is over, on whatever stream it ran
                transfer(copies, advance, threads=min(_THREADS, os.cpu_count() or 1))
            else:
                _copy_in_order(copies, advance)
            turn.done()
    seconds = time.perf_counter() - started
    logger.info(
        "read %.2f GiB of weights in %.1f s (%.1f GiB/s)", total / 2**30, seconds, total / 2**30 / seconds
    )


def transfer(
    copies: Iterable[Copy],
    advance: Callable[[int], None],
    *,
    threads: int,
    piece_bytes: int = _PIECE_BYTES,
) -> None:
    """Fill the destinations by ``threads`` threads, piece by piece; each tells ``advance`` of its bytes."""
    pieces: queue.SimpleQueue[_Piece] = queue.SimpleQueue()
    device = torch.device("cpu")
    for stored, destination in copies:
        device = destination.device
        for piece in _pieces(stored, destination, piece_bytes):
            pieces.put(piece)

    def work() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # what a thread pins is of its own current device
            with _Lane(device, piece_bytes) as lane:
                for piece in _drain(pieces):
                    lane.carry(piece)
                    advance(piece.num_bytes)
        except BaseException:
            for _ in _drain(pieces):  # the other threads stop at their next piece
                continue
            raise

    with ThreadPoolExecutor(threads, thread_name_prefix="weights") as pool:
        for running in [pool.submit(work) for _ in range(threads)]:
            running.result()


@attrs.frozen(eq=False)
class _Piece:
    """Elements of a stored tensor that follow each other in it, or rows of its columns."""

    file: Path
    offset: int
    num_bytes: int
    dtype: torch.dtype
    destination: torch.Tensor  #: flat
    run: int  #: bytes that lie together
    stride: int  #: from the start of a run to that of the next


def _pieces(stored: StoredTensor, destination: torch.Tensor, piece_bytes: int) -> Iterator[_Piece]:
    flat = destination.view(-1)
    size = stored.dtype.itemsize
    run = stored.num_bytes // stored.shape[0] if stored.stride is not None else size
    stride = stored.stride or run
    step = piece_bytes // run  # runs of a piece
    for first in range(0, stored.num_bytes // run, step):
        part = flat[first * run // size : (first + step) * run // size]
        num_bytes = part.numel() * size
        together = num_bytes if stride == run else run
        offset = stored.offset + first * stride
        yield _Piece(stored.file, offset, num_bytes, stored.dtype, part, together, stride)


def _drain(pieces: queue.SimpleQueue[_Piece]) -> Iterator[_Piece]:
    with contextlib.suppress(queue.Empty):
        while True:
            yield pieces.get_nowait()


class _Lane:
    """One thread's way to the device: one buffer is read into while the other's content travels."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._buffers = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._cuda) for _ in range(2)]
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._sent = [torch.cuda.Event() for _ in range(2)] if self._cuda else []
        self._turn = 0
        self._files: dict[Path, io.FileIO] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stream is not None:
            self._stream.synchronize()
        for file in self._files.values():
            file.close()

    def carry(self, piece: _Piece) -> None:
        self._turn ^= 1
        if self._cuda:
            self._sent[self._turn].synchronize()  # returns at once where nothing was sent yet
        buffer = self._buffers[self._turn][: piece.num_bytes]
        self._read(piece, memoryview(buffer.numpy()))  # type: ignore[arg-type]  # it is one
        source = buffer.view(piece.dtype)
        if self._stream is None:
            piece.destination.copy_(source)
            return
        with torch.cuda.stream(self._stream):
            if source.dtype is not piece.destination.dtype:  # copy_ alone would convert on the host
                source = source.to(self._device, non_blocking=True)
            piece.destination.copy_(source, non_blocking=True)
            self._sent[self._turn].record(self._stream)

    def _read(self, piece: _Piece, target: memoryview) -> None:
        try:
            if piece.file not in self._files:
                self._files[piece.file] = io.FileIO(piece.file)
            file = self._files[piece.file]
            for number, begin in enumerate(range(0, piece.num_bytes, piece.run)):
                file.seek(piece.offset + number * piece.stride)
                _read_all(file, target[begin : begin + piece.run])
        except OSError as error:
            raise ConfigError(f"weight file {piece.file} cannot be read ({error}); fetch it again") from error


def _read_all(file: io.FileIO, target: memoryview) -> None:
    done = 0
    while done < len(target):
        count = file.readinto(target[done:])
        if not count:
            raise OSError("it ended early")
        done += count


def _copy_in_order(copies: Sequence[Copy], advance: Callable[[int], None]) -> None:
    files: dict[Path, list[Copy]] = {}
    for copy in copies:
        files.setdefault(copy[0].file, []).append(copy)
    for file, entries in files.items():
        with open_weights(file) as tensors:
            for stored, destination in entries:
                destination.copy_(
                    tensors.get_slice(stored.name)[stored.index]
                    if stored.index
                    else tensors.get_tensor(stored.name)
                )
                advance(stored.num_bytes)


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, for what is large or takes long and unless this package's log is turned off."""
    from tqdm import tqdm

    lock = threading.Lock()
    with tqdm(
        total=total,
        desc="weights",
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        leave=False,
        delay=0 if total > _SHOWN_BYTES else _SHOWN_SECONDS,
        disable=not logger.isEnabledFor(logging.WARNING),
    ) as bar:

        def advance(num_bytes: int) -> None:
            with lock:
                bar.update(num_bytes)

        yield advance
